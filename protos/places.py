"""The places that a run names, and which of them may be on the disk of whoever takes part in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REMOTE = frozenset(("abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "http", "https", "oci", "oss", "r2", "s3", "s3a"))
"""The same wherever it is read. What these may read and write follows from the credentials that a process is given."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def local_places(source: str, tokenizer: str, pretrained: str, checkpoint: str) -> Iterator[tuple[str, str]]:
    """The run file's key, and the place, of each that may be on the local disk. Whatever is not known to be elsewhere may be: so
    may data sets without a slash in their name, as `datasets` has builders of such names, like "csv", that read the working
    directory."""
    if source.startswith("hf:"):
        whole = source.removeprefix("hf:")
        name = whole.partition(":")[0]
        if "/" not in name or _is_local_name(whole) or _is_local_name(name):
            yield "data.source", whole
    elif source != "python-stdlib" and not source.startswith("module:"):
        yield "data.source", source
    if tokenizer not in ("", "bytes") and _is_local_name(tokenizer):
        yield "data.tokenizer", tokenizer
    if pretrained and (_is_local_url(pretrained) if "://" in pretrained else _is_local_name(pretrained)):
        yield "model.pretrained", pretrained
    if _is_local_url(checkpoint):
        yield "checkpoint.uri", checkpoint


def path_of(place: str) -> str:
    """Without the scheme of a local URL."""
    return re.sub(r"\A(file|local):(//)?", "", place)


def _is_local_url(place: str) -> bool:
    scheme = _SCHEME.match(place)
    return scheme is None or "::" in place or scheme[1].lower() not in REMOTE


def _is_local_name(name: str) -> bool:
    """Whether this may be no name on the hub: it looks like a path, or there is one."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).expanduser().exists()
