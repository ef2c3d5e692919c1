"""Backups on this node's own disk: of a few steps, some buckets of the run's state, each in a file like a checkpoint's."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from dtfm.node.state.checkpoint import file_name, write
from dtfm.node.state.state_store import Piece
from dtfm.protos.frame import Header, Kind
from dtfm.protos.peer_pb2 import StateRequest

ROOM_SHARE = 0.5
"""What is written may take so much of the disk's free space."""

ABANDONED_SECONDS = 7 * 86_400.0
"""What a run left here is removed when nothing of it has changed for so long."""

_RUN = re.compile(r"backup-[0-9a-f]{32}")
_STEP = re.compile(r"step-([0-9]{1,10})")
_FILE = re.compile(r"bucket-([0-9]{5,9})\.safetensors")


class Disk:
    """A folder under ``root`` for this node and one run. Nothing is there until something is written. For any number of
    threads: a file is there whole or not at all."""

    def __init__(self, root: Path, node: str) -> None:
        self._root = root
        self._node = node
        self._folder: Path | None = None

    def open(self, run_id: str) -> None:
        """From now on it is about this run. The folder's name is a digest: neither a node nor a run can name another place."""
        digest = blake3(f"{self._node}\n{run_id}".encode()).hexdigest(16)
        self._folder = self._root / f"backup-{digest}"
        for other in self._root.iterdir() if self._root.is_dir() else ():
            if other != self._folder and _is_ours(other) and time.time() - other.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)

    @property
    def contents(self) -> Mapping[int, Mapping[int, int]]:
        """By step, then by bucket: the sizes of files, in bytes."""
        return {step: dict(_files(folder)) for step, folder in self._steps()}

    def write(self, step: int, bucket: int, content: bytes) -> None:
        """Raises OSError where it cannot be written, or would leave too little room."""
        self.check_room(len(content))
        write(str(self._step(step)), file_name(bucket), content)

    def check_room(self, size_bytes: int) -> None:
        """Raises OSError where so much would leave too little room for others."""
        self._root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._root).free
        if size_bytes > ROOM_SHARE * free:
            raise OSError(f"{self._root} has {free} bytes free; a backup takes no more than {ROOM_SHARE:.0%} of that")

    def read(self, step: int, bucket: int) -> bytes:
        """The file's content. Raises LookupError."""
        try:
            return (self._step(step) / file_name(bucket)).read_bytes()
        except OSError:
            raise LookupError(f"NOT_HELD: there is no backup of bucket {bucket} as of step {step} here") from None

    def find(self, step: int, bucket: int, digest: bytes) -> bytes | None:
        """The file's content, if it is there with that BLAKE3."""
        try:
            content = self.read(step, bucket)
        except LookupError:
            return None
        return content if blake3(content).digest() == digest else None

    def donate(self, request: StateRequest) -> Piece:
        """The asked-for file, from the asked-for byte on. Raises LookupError."""
        left = memoryview(self.read(request.step, request.bucket))[request.offset :]
        size = len(left)
        return Header(Kind.STATE, 0, 0, request.generation, request.step, request.bucket, 0, size, size), left

    def keep(self, steps: Collection[int]) -> None:
        """Removes what is of other steps."""
        for step, folder in self._steps():
            if step not in steps:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Removes all of this run."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _step(self, step: int) -> Path:
        if self._folder is None:
            raise LookupError("NOT_HELD: this node has read no run yet")
        return self._folder / f"step-{step:08d}"

    def _steps(self) -> Iterator[tuple[int, Path]]:
        for entry in sorted(self._folder.iterdir()) if self._folder is not None and self._folder.is_dir() else ():
            if match := _STEP.fullmatch(entry.name):
                yield int(match[1]), entry


def _is_ours(folder: Path) -> bool:
    """Whether nothing but a Disk can have made it: its parent may be a folder that is used for other things too."""
    named = _RUN.fullmatch(folder.name) is not None and folder.is_dir() and not folder.is_symlink()
    return named and all(_STEP.fullmatch(entry.name) for entry in folder.iterdir())


def _files(folder: Path) -> Iterator[tuple[int, int]]:
    for entry in sorted(folder.iterdir()):
        if match := _FILE.fullmatch(entry.name):
            yield int(match[1]), entry.stat().st_size
