"""Snapshots on this node's own disk: for a few steps, the files of some buckets."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from blake3 import blake3

from dtfm.node.data.shared.storage import PIECE_BYTES, NewFile
from dtfm.node.state.snapshot_files import file_name
from dtfm.node.state.state_store import Donation
from dtfm.protos.checkpoint_names import bucket_of, step_folder, step_of
from dtfm.protos.frame import Header, Kind
from dtfm.protos.peer_pb2 import StateRequest

FREE_SPACE_FRACTION = 0.5
"""A snapshot takes at most this fraction of the disk's free space."""

ABANDONED_SECONDS = 7 * 86_400.0
"""Seconds without a change after which another run's folder is removed."""

_RUN = re.compile(r"snapshots-[0-9a-f]{32}")


class Disk:
    """A folder under ``root`` for this node and one run, created by the first write. Thread-safe: a file is there in whole or
    not at all."""

    def __init__(self, root: Path, node: str) -> None:
        self._root = root
        self.node = node
        self._folder: Path | None = None

    def open(self, run_id: str) -> None:
        """Uses this run's folder from now on, and removes abandoned ones. The folder's name is a digest, so that neither a node
        nor a run can name another place."""
        digest = blake3(f"{self.node}\n{run_id}".encode()).hexdigest(16)
        self._folder = self._root / f"snapshots-{digest}"
        for other in self._root.iterdir() if self._root.is_dir() else ():
            if other != self._folder and _is_ours(other) and time.time() - other.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)

    @property
    def contents(self) -> Mapping[int, Mapping[int, int]]:
        """The sizes of the files in bytes, by step and bucket."""
        return {step: dict(_files(folder)) for step, folder in self._steps()}

    @property
    def free_bytes(self) -> int:
        """On the disk. Raises OSError."""
        self._root.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self._root).free

    def new_file(self, step: int, bucket: int, size_bytes: int) -> NewFile:
        """A file of ``size_bytes`` to be written. Raises OSError if it cannot be, or would leave too little free space."""
        self.check_room(size_bytes)
        return NewFile(str(self._step(step)), file_name(bucket))

    def scratch(self, size_bytes: int) -> BinaryIO:
        """A file without a name for ``size_bytes`` that will be read back: whatever ends this process also ends the file.

        Raises as `new_file` does.
        """
        self.check_room(size_bytes)
        return cast(BinaryIO, tempfile.TemporaryFile(dir=self._root))

    def check_room(self, size_bytes: int) -> None:
        """Raises OSError if ``size_bytes`` would leave too little free space."""
        free = self.free_bytes
        if size_bytes > FREE_SPACE_FRACTION * free:
            raise OSError(
                f"{self._root} has {free} bytes free; a snapshot takes at most {FREE_SPACE_FRACTION:.0%} of that"
            )

    def read(
        self, step: int, bucket: int, offset: int = 0, at_once: int = PIECE_BYTES
    ) -> tuple[int, Iterator[memoryview]]:
        """The number of the file's bytes from ``offset`` on, and these, as many ``at_once``. Raises LookupError."""
        try:
            file = (self._step(step) / file_name(bucket)).open("rb")
            size = os.fstat(file.fileno()).st_size
        except OSError:
            raise LookupError(f"NOT_HELD: bucket {bucket} as of step {step} is in no snapshot on this disk") from None
        begin = min(offset, size)

        def pieces() -> Iterator[memoryview]:
            with file:
                file.seek(begin)
                while piece := file.read(at_once):
                    yield memoryview(piece)

        return size - begin, pieces()

    def has(self, step: int, bucket: int, digest: bytes, take: Callable[[memoryview], object] = lambda _: None) -> bool:
        """Whether the file is there with that BLAKE3. ``take`` gets its pieces, which count only if it is."""
        found = blake3()
        try:
            for piece in self.read(step, bucket)[1]:
                found.update(piece)
                take(piece)
        except (LookupError, OSError):
            return False
        return found.digest() == digest

    def donate(self, request: StateRequest) -> Donation:
        """The requested file, from the requested byte on. Raises LookupError."""
        size, pieces = self.read(request.step, request.bucket, request.offset)
        header = Header(Kind.STATE, 0, 0, request.generation, request.step, request.bucket, 0, size, size)
        return header, pieces if size else iter((memoryview(b""),))

    def keep(self, steps: Collection[int]) -> None:
        """Removes all snapshots except these steps'."""
        for step, folder in self._steps():
            if step not in steps:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Removes this run's folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _step(self, step: int) -> Path:
        if self._folder is None:
            raise LookupError("NOT_HELD: this node has not loaded a run yet")
        return Path(step_folder(str(self._folder), step))

    def _steps(self) -> Iterator[tuple[int, Path]]:
        for entry in sorted(self._folder.iterdir()) if self._folder is not None and self._folder.is_dir() else ():
            if (step := step_of(entry.name)) is not None:
                yield step, entry


def _is_ours(folder: Path) -> bool:
    """Whether only a Disk can have made it: the parent folder may be used for other things too."""
    named = _RUN.fullmatch(folder.name) is not None and folder.is_dir() and not folder.is_symlink()
    return named and all(step_of(entry.name) is not None for entry in folder.iterdir())


def _files(folder: Path) -> Iterator[tuple[int, int]]:
    for entry in sorted(folder.iterdir()):
        if (bucket := bucket_of(entry.name)) is not None:
            yield bucket, entry.stat().st_size
