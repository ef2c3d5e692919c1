"""What this machine's operator lets a run read and write here, and elsewhere with this machine's credentials.

The run file comes from the coordinator, and so do its paths and URLs.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from dtfm.node.data.problems import told_together
from dtfm.protos.places import expanded, guarded_places, is_guarded_url, is_remote_url
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.source_files import glob_of

ALLOW = "--allow-data"
ALLOW_MODULE = "--allow-module"
NOTHING = "none"
EVERYTHING = ("/", "*:")
"""What the user who runs the coordinator allows: all files, and all URLs."""
_ALL_URLS = EVERYTHING[1]
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Allowed:
    """The names that a run may use on this machine.

    ``places``: its files, URLs that are reached with its keys or in its network, and repositories of the hub that are read with
    its token (see read_allowed). ``modules``: its code, as import paths (see import_allowed).
    """

    places: Sequence[str] = ()
    modules: Sequence[str] = ()


def read_allowed(globs: Sequence[str]) -> tuple[str, ...]:
    """The values of ALLOW: URLs, repositories of the hub (hf:OWNER/NAME, hf:OWNER/*), and absolute paths. Links in a path are
    resolved up to the first wildcard. Raises ValueError."""
    for text in globs:
        if "**" in text:
            raise ValueError(f"{ALLOW} {text!r}: leave out **; an allowed folder includes everything in it")
        if not text:
            raise ValueError(f"{ALLOW} is empty; name a file, a folder or a pattern, like '/data/*.txt'")
    try:
        return tuple(text if is_remote_url(text) else _resolved(text) for text in globs)
    except ValueError as problem:
        raise ValueError(f"{ALLOW} {problem}") from None


def said(options: Sequence[str] | None) -> Sequence[str] | None:
    """The operator's ALLOW or ALLOW_MODULE. None: the operator has said nothing. NOTHING takes earlier values back."""
    return () if options and list(options) == [NOTHING] else options or None


def check_places(run: Run, allowed: Sequence[str]) -> None:
    """Raises ValueError unless all places of the run are ``allowed`` (see `read_allowed`), or in an allowed folder. The places
    are files of this machine that the run may read or write, and URLs that it would reach with this machine's credentials."""
    model = run.model
    adapter = model.adapter.pretrained
    places = guarded_places(places_of(run.data), run.data.tokenizer, model.pretrained, run.checkpoint.uri, adapter)
    told_together(partial(_check, key, path, allowed) for key, path in places)


def places_of(data: Run.Data) -> list[tuple[str, str]]:
    """The run file's key, and the place, of each source of the data."""
    several = [(f"data.sources[{number}].source", each.source) for number, each in enumerate(data.sources)]
    held_out = [("data.held_out", data.held_out)] if data.held_out else []
    return [*(several or [("data.source", data.source)]), *held_out]


def check_checkpoint(folder: str, allowed: Sequence[str]) -> None:
    """Raises ValueError unless the run may read the checkpoint that the coordinator names. The same rule holds as for
    checkpoint.uri. The checkpoint may be elsewhere, because a run that goes on may have another uri."""
    check_places(Run(data=Run.Data(source="python-stdlib"), checkpoint=Run.Checkpoint(uri=folder)), allowed)


def _check(key: str, path: str, allowed: Sequence[str]) -> None:
    try:
        start = expanded(path)
    except ValueError as problem:
        raise ValueError(f"{key} {problem}") from None
    is_url = is_guarded_url(path)
    pattern = _is_source(key) and not is_url and _MAGIC.search(path) is not None and not os.path.exists(start)
    named = path if is_url else _resolved(path) if pattern else os.path.realpath(start)
    if ".." in Path(named).parts or not _is_allowed(named, allowed):
        raise ValueError(
            f"{key}: this node's operator does not let a run use {path!r} here; to allow it, start the node with "
            f"{ALLOW} '{named}'{_slash(key, path)}"
        )
    if not pattern:
        return
    for file in glob.iglob(glob_of(start), recursive=True):
        check_match(key, file, allowed)


def _is_source(key: str) -> bool:
    return key.startswith("data.") and key != "data.tokenizer"


def everything(allowed: Sequence[str]) -> bool:
    """Whether all URLs are ``allowed``."""
    return _ALL_URLS in allowed


def allows_hub(repository: str, allowed: Sequence[str]) -> bool:
    """Whether a run may read OWNER/NAME of the hub with this machine's token."""
    return everything(allowed) or (".." not in Path(repository).parts and _is_allowed(f"hf:{repository}", allowed))


def allows_url(url: str, allowed: Sequence[str]) -> bool:
    """Whether a run may call this URL in this machine's network."""
    return everything(allowed) or (".." not in Path(url).parts and _is_allowed(url, allowed))


def check_match(key: str, file: str, allowed: Sequence[str]) -> None:
    """Raises ValueError unless ``file`` leads to an ``allowed`` file. ``file`` matches the pattern of the run file's ``key``."""
    if not _is_allowed(os.path.realpath(file), allowed):
        raise ValueError(
            f"{key}: {file} leads to a file that this node's operator does not let a run use; to allow it, name that file "
            f"with {ALLOW} too"
        )


def _slash(key: str, place: str) -> str:
    looks_like_a_name = _is_source(key) and place.replace("_", "").isalnum()
    return f"; or, if a data set of the hub is meant, by its whole name, hf:OWNER/{place}" if looks_like_a_name else ""


def _is_allowed(path: str, allowed: Sequence[str]) -> bool:
    """``path`` is a URL, or an absolute path without links, or a pattern that begins with such a path."""
    parts = Path(path).parts
    return any(
        len(wanted) <= len(parts) and all(map(_matches, parts, wanted))
        for wanted in (Path(text).parts for text in allowed)
    )


def _matches(part: str, wanted: str) -> bool:
    return part == wanted or (not _MAGIC.search(part) and fnmatchcase(part, wanted))


def _resolved(pattern: str) -> str:
    """The pattern as an absolute path, without links before the first part with a wildcard."""
    parts = expanded(pattern).parts
    fixed = next((index for index, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    return str(Path(os.path.realpath(Path(*parts[:fixed])), *parts[fixed:]))
