"""The places that a run names, and which of them take the leave of whoever takes part in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dtfm.protos.run_file.records import HUB, STANDARD_LIBRARY

LOCAL = frozenset(("file", "local"))
"""On the disk of whoever reads it, where a file that is being written shows."""
REMOTE = frozenset(("abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "http", "https", "oci", "oss", "r2", "s3", "s3a"))
"""The same wherever it is read. What these may read and write follows from the credentials that a process finds."""
COORDINATOR = "coordinator"
"""The disk of the run's coordinator, which nodes reach over their connection to it."""
COORDINATORS_DISK = f"{COORDINATOR}://disk"
"""Its URL for nodes."""
PRETRAINED = "pretrained"
"""There, the folder of the weights that the run begins with, if the coordinator has them."""
ADAPTER = "adapter"
"""There, the folder of the adapter that the run begins with, if the coordinator has it."""
WEB = frozenset(("http", "https"))
_FREE = WEB | {"memory", COORDINATOR}
"""Read without credentials of this machine. A web server in its own network takes leave all the same."""
KNOWN = REMOTE | LOCAL | {"memory", COORDINATOR}
"""What a run may name. Any other scheme could lead back to this machine's files, as fsspec's "dir" does, or to hosts that its
user has keys for, as "sftp" does. "memory" is a process's own."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def guarded_places(
    sources: Iterable[tuple[str, str]], tokenizer: str, pretrained: str, checkpoint: str, adapter: str = ""
) -> Iterator[tuple[str, str]]:
    """The run file's key, and the path or URL, of each place that may be on the local disk, or that is reached with credentials
    of this machine. Whatever is not known to be elsewhere may be on the disk: so may data sets without a slash in their name, as
    `datasets` has builders of such names, like "csv", that read the working directory. Raises ValueError for a place that no run
    may name (see `check_url`). ``sources``: the key and the place of each source of data. ``adapter``: the one to begin with."""
    for key, source in sources:
        yield from _of_source(key, source)
    if tokenizer not in ("", "bytes") and is_local_name(tokenizer):
        yield "data.tokenizer", tokenizer
    for key, weights in (("model.pretrained", pretrained), ("adapter.pretrained", adapter)):
        if "://" in weights or "::" in weights:
            yield from _guarded_url(key, weights)
        elif weights and is_local_name(weights):
            yield key, weights
    yield from _guarded_url("checkpoint.uri", checkpoint)


def _of_source(key: str, source: str) -> Iterator[tuple[str, str]]:
    if source.startswith(HUB):
        whole, name = source.removeprefix(HUB), hub_name(source)[0]
        if "/" not in name or is_local_name(whole) or is_local_name(name):
            yield key, name
    elif is_url(source):
        yield from _guarded_url(key, source)
    elif source != STANDARD_LIBRARY and not source.startswith("module:"):
        yield key, source


def hub_name(source: str) -> tuple[str, str, str]:
    """The name, the configuration and the revision of "hf:NAME[:CONFIG][@REVISION]"; the last two may be empty. All of a path
    that exists is the name."""
    whole = source.removeprefix(HUB)
    if os.path.exists(os.path.expanduser(whole)):
        return whole, "", ""
    before, _, revision = whole.partition("@")
    name, _, configuration = (before, "", "") if os.path.exists(os.path.expanduser(before)) else before.partition(":")
    return name, configuration, revision


def is_url(place: str) -> bool:
    """Whether it is a URL of any scheme, and no path."""
    return "://" in place


def check_url(place: str) -> None:
    """Raises ValueError, to follow the key's name, unless ``place`` is a path, or a URL of a KNOWN scheme that is not wrapped
    into another ("::")."""
    scheme = _SCHEME.match(place)
    if "::" in place or (scheme is not None and scheme[1].lower() not in KNOWN):
        raise ValueError(
            f"names {place!r}, which no run may use; give a path, or a URL without :: of one of these kinds: "
            + ", ".join(sorted(KNOWN))
        )


def expanded(path: str) -> Path:
    """The path, with a user's home folder for a ~ at its start. Raises ValueError, to follow the key's name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"names {path!r}, and no home folder of that user is known here; give the whole path"
        ) from None


def told_by(place: str, error: Exception) -> str:
    """What the storage at ``place`` has said, with what to look at."""
    keys = isinstance(error, PermissionError) and not is_local_url(place)
    hint = " (with the keys that this process finds, as in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)" if keys else ""
    return f"{type(error).__name__}: {error}{hint}"


def _guarded_url(key: str, place: str) -> Iterator[tuple[str, str]]:
    try:
        check_url(place)
    except ValueError as problem:
        raise ValueError(f"{key} {problem}") from None
    if is_local_url(place):
        yield key, re.sub(r"\A(file|local):(//)?", "", place, flags=re.IGNORECASE)
    elif is_guarded_url(place):
        yield key, place


def is_guarded_url(place: str) -> bool:
    """Whether it is a URL that is reached with credentials."""
    scheme = _SCHEME.match(place)
    return scheme is not None and scheme[1].lower() in REMOTE - _FREE


def is_remote_url(place: str) -> bool:
    """Whether it is a URL of a place that is the same wherever it is read."""
    scheme = _SCHEME.match(place)
    return scheme is not None and scheme[1].lower() in REMOTE


def is_web(place: str) -> bool:
    """Whether it is a URL of a web server."""
    scheme = _SCHEME.match(place)
    return scheme is not None and scheme[1].lower() in WEB


def is_local_url(place: str) -> bool:
    """Whether it is a path, or a URL of one, on the disk of whoever reads it."""
    scheme = _SCHEME.match(place)
    return scheme is None or scheme[1].lower() in LOCAL


def is_local_name(name: str) -> bool:
    """Whether this may be no name on the hub: it looks like a path, or there is one on this machine."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or os.path.exists(name)


def is_on_hub(name: str) -> bool:
    """Whether this is OWNER/NAME of a repository on the hub, maybe with "@" and a revision, and no path that is here."""
    return name.partition("@")[0].count("/") == 1 and not is_local_name(name)
