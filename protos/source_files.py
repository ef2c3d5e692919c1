"""The files of a source of data, described so that others can tell which of them differs, and where.

Both sides describe files: a node the files that it has read, the coordinator its own copies.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from dtfm.protos.places import expanded, is_local_url

if TYPE_CHECKING:
    from dtfm.protos import control_pb2 as wire  # whoever only reads logs does without it

MOST_FILES = 256
"""Files and groups of files of a run that are described. Each of its sources has an equal part of them."""
MOST_DESCRIBED = 2 * MOST_FILES
"""Files and groups in a description: as many again may be at URLs."""
MOST_NAME = 128
"""Characters of a name."""
MOST_RANGES = 2048
"""Ranges of all files together."""
LEAST_RANGE = 1 << 12
"""Bytes."""
RANGE_DIGEST = 8
"""Bytes of a range's digest. It only tells where two files differ: the whole file's digest tells whether they do."""
DIGEST = 32
_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, or a group of files, as one machine has it."""

    key: str
    """The run file's key of its source."""
    name: str
    """Its path below the folder that all files of the source are in."""
    size: int
    """Bytes."""
    digest: str = ""
    """The BLAKE3 (hex) of its content; of a group, of the files' digests; of a file at a URL, of what its server says of it.
    Empty: not known."""
    range_bytes: int = 0
    """The length of each range but the last. 0: it has no ranges, like a group."""
    ranges: str = ""
    """The digests of its ranges in a row (hex)."""

    @property
    def message(self) -> wire.SourceFile:
        """As nodes send it."""
        from dtfm.protos import control_pb2 as wire

        return wire.SourceFile(
            key=self.key,
            name=self.name,
            size=self.size,
            digest=bytes.fromhex(self.digest),
            range_bytes=self.range_bytes,
            ranges=bytes.fromhex(self.ranges),
        )


Files = tuple[SourceFile, ...]


def read_file(message: wire.SourceFile) -> SourceFile:
    """The content of a message that was checked."""
    return SourceFile(
        message.key, message.name, message.size, message.digest.hex(), message.range_bytes, message.ranges.hex()
    )


def glob_of(path: Path) -> str:
    """The argument of `glob` for ``path``, which may be a pattern. Brackets in the names of existing folders and files are no
    wildcards."""
    start = 0
    while start < len(path.parts) and os.path.exists(Path(*path.parts[: start + 1])):
        start += 1
    return str(Path(glob.escape(str(Path(*path.parts[:start]))), *path.parts[start:]))


def names_on_disk(place: str) -> list[str]:
    """The files and folders of this machine that a path, a pattern, or the URL of one names, in order. Raises ValueError, to
    follow the key's name, for a home folder that is not known."""
    pattern = re.sub(r"\A(file|local):(//)?", "", place, flags=re.IGNORECASE) if is_local_url(place) else place
    return sorted(glob.glob(glob_of(expanded(pattern)), recursive=True))


def grouped(files: Sequence[SourceFile]) -> SourceFile:
    """The files of a source as one group."""
    digest = blake3("".join(f"{file.name}\n{file.digest}\n" for file in files).encode())
    name, size = _span(files[0].name, files[-1].name, len(files)), sum(file.size for file in files)
    return SourceFile(files[0].key, name, size, digest.hexdigest())


def described(sources: Sequence[tuple[str, Sequence[Path]]], number: int = 1) -> Files:
    """Reads and describes the files of each source: ``sources`` has the run file's key, and the files in order. Raises OSError.

    ``number``: of all sources of the run. A source is described alike wherever its files are the same: a machine may lack those
    of another."""
    number = max(number, len(sources))
    return tuple(each for key, files in sources for each in _of_source(key, _named(files), number))


def difference(here: Files, there: Files, others: str) -> str:
    """Which file differs first, and where, in a clause; empty: none that is described on both sides does. ``others``: whose the
    files ``there`` are, as in "the other nodes"."""
    keys = [key for key in dict.fromkeys(file.key for file in here) if any(file.key == key for file in there)]
    for key in keys:
        mine, theirs = ({file.name: file for file in files if file.key == key} for files in (here, there))
        for name in theirs:
            if name not in mine:
                return f"{key}: {name} is on {others}, and not here"
        for name, file in mine.items():
            if name not in theirs:
                return f"{key}: {name} is here, and not on {others}"
            if where := _differs(file, theirs[name], others):
                return f"{key}: {name} {where}"
    return ""


def _differs(here: SourceFile, there: SourceFile, others: str) -> str:
    if here.size == there.size and (here.digest == there.digest or not (here.digest and there.digest)):
        return ""
    sizes = f"has {here.size:,} bytes here, and {there.size:,} on {others}" if here.size != there.size else "differs"
    return f"{sizes}{_where(here, there)}"


def _where(here: SourceFile, there: SourceFile) -> str:
    length, both = here.range_bytes, min(here.size, there.size)
    if not length or length != there.range_bytes:
        return ""
    mine, theirs = (bytes.fromhex(file.ranges) for file in (here, there))
    whole = both // length if here.size != there.size else -(-both // length)
    for number in range(whole):
        at = slice(number * RANGE_DIGEST, (number + 1) * RANGE_DIGEST)
        if mine[at] != theirs[at]:
            end = min((number + 1) * length, both)
            return f"; the first byte that differs is from byte {number * length:,} to {end - 1:,}"
    return f"; the first byte that differs is from byte {whole * length:,} on" if here.size != there.size else ""


def _of_source(key: str, named: Sequence[tuple[str, Path]], number: int) -> Iterator[SourceFile]:
    share = -(-len(named) // (MOST_FILES // number))
    for first in range(0, len(named), max(1, share)):
        if share == 1:
            yield _described(key, *named[first], MOST_RANGES // number // len(named))
        else:
            yield _group(key, named[first : first + share])


def _named(files: Sequence[Path]) -> list[tuple[str, Path]]:
    """Each file with its path below the folder that all are in."""
    whole = [file.absolute() for file in files]
    folder = os.path.commonpath([file.parent for file in whole]) if whole else ""
    return [(short_name(os.path.relpath(file, folder)), file) for file in whole]


def short_name(name: str) -> str:
    """The name; or the end of a long name, with a digest of the whole: two files must not have one name."""
    printable = "".join(each if each.isprintable() else "?" for each in name)
    if printable == name and len(name) <= MOST_NAME:
        return name
    return f"{blake3(os.fsencode(name)).hexdigest(4)}...{printable[-(MOST_NAME - 16) :]}"


def _described(key: str, name: str, file: Path, most_ranges: int) -> SourceFile:
    size = file.stat().st_size
    length = LEAST_RANGE
    while length * most_ranges < size:
        length *= 2
    whole, ranges = blake3(max_threads=blake3.AUTO), bytearray()
    for piece in _ranges(file, length, whole):
        ranges += piece
    return SourceFile(key, name, size, whole.hexdigest(), length, ranges.hex())


def _ranges(file: Path, length: int, whole: blake3) -> Iterator[bytes]:
    """The digest of each range of the file, whose content goes into ``whole``."""
    part, left = blake3(), length
    with file.open("rb", buffering=0) as content:
        while piece := content.read(_PIECE):
            whole.update(piece)
            view = memoryview(piece)
            while view:
                part.update(view[:left])
                took = min(left, len(view))
                view, left = view[took:], left - took
                if not left:
                    yield part.digest(RANGE_DIGEST)
                    part, left = blake3(), length
    if left < length:
        yield part.digest(RANGE_DIGEST)


def _group(key: str, named: Sequence[tuple[str, Path]]) -> SourceFile:
    digest, size = blake3(), 0
    for name, file in named:
        content = file.read_bytes() if file.stat().st_size < _PIECE else None
        its = blake3(content) if content is not None else blake3(max_threads=blake3.AUTO).update_mmap(file)
        digest.update(f"{name}\n".encode("utf-8", "surrogateescape")).update(its.digest())
        size += file.stat().st_size
    return SourceFile(key, _span(named[0][0], named[-1][0], len(named)), size, digest.hexdigest())


def _span(first: str, last: str, number: int) -> str:
    """A group's name."""
    one, other = (short_name(name)[-(MOST_NAME // 2 - 16) :] for name in (first, last))
    return f"{one} to {other} ({number} files)"
