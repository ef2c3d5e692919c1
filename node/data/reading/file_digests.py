"""Describes the files that this node has read, so that the coordinator can say which of them differs from others' copies.

Each file is read once more for that, as fast as the disk allows. The result is kept beside the tokens.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from blake3 import blake3

from dtfm.node.data.reading.files import File, files_of
from dtfm.node.data.reading.sources import Source, library_files, state_of
from dtfm.protos.places import is_remote_url
from dtfm.protos.run_file.records import HUB, STANDARD_LIBRARY
from dtfm.protos.source_files import MOST_FILES, Files, SourceFile, described, grouped, short_name

log = logging.getLogger(__name__)

_FORMAT = 2
"""Number of the way in which files are described. Raise it when that changes: descriptions that are kept are then not used."""


def files_read(sources: Sequence[Source], cache: Path | None, allowed: Sequence[str]) -> Files:
    """The files of the sources, but for data sets of the hub. ``cache``: the folder that this machine's nodes share. Empty, with
    a warning, if they can no longer be read: they only explain a difference."""
    try:
        states = [f"{source.key}\n{source.place}\n{state_of(source, allowed)}" for source in sources]
        kept = cache / f"{blake3(chr(0).join([str(_FORMAT), *states]).encode()).hexdigest(16)}.files" if cache else None
        if kept is not None and (found := _kept(kept)) is not None:
            return found
        here = [(source.key, _on_disk(source, allowed)) for source in sources]
        there = [_elsewhere(source, allowed) for source in sources]
        short = sum(map(len, there)) <= MOST_FILES
        found = described([(key, files) for key, files in here if files], len(sources))
        found += tuple(file for files in there for file in (files if short or not files else [grouped(files)]))
        if kept is not None:
            _keep(kept, found)
        return found
    except (OSError, ValueError) as problem:
        log.warning("the files of the data cannot be described: %s", problem)
        return ()


def _on_disk(source: Source, allowed: Sequence[str]) -> list[Path]:
    if source.place == STANDARD_LIBRARY:
        return [file for _, file in library_files()]
    if source.place.startswith(HUB) or is_remote_url(source.place):
        return []
    return [Path(file.name) for file in files_of(source.place, source.key, allowed)]


def _elsewhere(source: Source, allowed: Sequence[str]) -> list[SourceFile]:
    if source.place.startswith(HUB) or not is_remote_url(source.place):
        return []
    files = files_of(source.place, source.key, allowed)
    folder = os.path.commonpath([os.path.dirname(file.name) for file in files])
    return [_at_url(file, folder) for file in files]


def _at_url(file: File, folder: str) -> SourceFile:
    name = short_name(os.path.relpath(file.name, folder))
    return SourceFile(file.key, name, file.size, blake3(file.state.encode()).hexdigest() if file.state else "")


def _kept(path: Path) -> Files | None:
    try:
        return tuple(SourceFile(**fields) for fields in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _keep(path: Path, files: Files) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with open(handle, "w", encoding="utf-8") as file:
        json.dump([asdict(each) for each in files], file)
    os.replace(part, path)
