"""The coordinator's own disk, for runs that name no other storage: nodes put the files of checkpoints there, and read them
back.

A file is written beside its place, and moved there when it is whole. The core decides who may write which file, and how large
the file may be (core/copies/checkpoints.py). So no member can write another member's file.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from dtfm.coordinator.core.copies.disks import ROOM_BYTES
from dtfm.protos import control_pb2 as wire
from dtfm.protos.checkpoint_names import bucket_of, gathering_of, step_of
from dtfm.protos.places import ADAPTER, PRETRAINED
from dtfm.protos.published_files import ADAPTER as ADAPTER_FILE, ADAPTER_CONFIG

MOST_PIECE_BYTES = 1 << 20

UPLOAD_BYTES = 16

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")


_OF_ADAPTER = frozenset({ADAPTER_CONFIG, f"{ADAPTER_FILE}.safetensors"})
"""The folder may be any that its owner has named: members read nothing else there."""


class Forbidden(ValueError):
    """The caller may not write or read there."""


class Disk:
    """Files below ``root``, and in ``pretrained`` and ``adapter``, which are only read. All methods wait for the disk, and raise
    OSError."""

    def __init__(self, root: Path, pretrained: Path | None = None, adapter: Path | None = None) -> None:
        self._root = root
        self._only_read = {PRETRAINED: pretrained, ADAPTER: adapter}

    def put(self, request: wire.PutRequest, most_bytes: int) -> None:
        """Writes a piece. ``most_bytes``: the largest size that the caller may give the file; 0: the caller may not write it.
        Raises Forbidden."""
        place = self._place(request.path)
        size = request.offset + len(request.data)
        if size > most_bytes or not most_bytes:
            raise Forbidden(f"{request.path}: this node may write {most_bytes} bytes there now, not {size}")
        if len(request.data) > MOST_PIECE_BYTES or len(request.upload) != UPLOAD_BYTES:
            raise Forbidden(
                f"{request.path}: a piece has at most {MOST_PIECE_BYTES} bytes, and an upload's number {UPLOAD_BYTES}"
            )
        part = place.with_name(f"{place.name}.{request.upload.hex()}.part")
        if request.last:
            self._finish(part, place, request.offset)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        self._check_room(len(request.data))
        if not part.exists():
            self._forget_attempts(place)
        file = os.open(part, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, request.data, request.offset)
        finally:
            os.close(file)

    def look(self, path: str) -> list[wire.LookReply.Entry]:
        """Describes the file or folder at a path. Raises FileNotFoundError and Forbidden."""
        place = self._place(path, folder=True)
        found = [each for each in sorted(place.iterdir()) if each.suffix != ".part"] if place.is_dir() else [place]
        if path.partition("/")[0] == ADAPTER:
            found = [each for each in found if each.name in _OF_ADAPTER]
        return [
            wire.LookReply.Entry(
                path=f"{path.partition('/')[0]}/{each.name}", size_bytes=each.stat().st_size, is_folder=each.is_dir()
            )
            for each in found
        ]

    def get(self, path: str, offset: int, length: int) -> bytes:
        """A piece of a file. Raises FileNotFoundError and Forbidden."""
        with self._place(path).open("rb") as file:
            file.seek(offset)
            return file.read(min(length, MOST_PIECE_BYTES))

    def _place(self, path: str, *, folder: bool = False) -> Path:
        """The place of a path. Raises Forbidden unless the path is a file of a checkpoint, or with ``folder`` a checkpoint."""
        first, _, name = path.partition("/")
        known = step_of(first) is not None or gathering_of(first) is not None
        parent = self._root / first if known else self._only_read.get(first)
        if parent is None or not (_NAME.fullmatch(name) or (folder and not name)):
            raise Forbidden(f"{path[:100]!r} is no file of a checkpoint")
        if first == ADAPTER and name and name not in _OF_ADAPTER:
            raise FileNotFoundError(f"{name} is no file of an adapter")
        return parent / name

    def _finish(self, part: Path, place: Path, size: int) -> None:
        if not part.exists() and place.exists() and place.stat().st_size == size:
            return  # it was said before
        with part.open("rb") as file:
            os.fsync(file.fileno())
        if part.stat().st_size != size:
            raise OSError(f"{place.name} has {part.stat().st_size} bytes of {size}; write it once more")
        part.replace(place)

    def _forget_attempts(self, place: Path) -> None:
        """Removes earlier attempts at the bucket's file, or at the model's: only one attempt is there at a time."""
        bucket = bucket_of(place.name)
        begun = f"{place.name}.*.part" if bucket is None else f"bucket-{bucket:05d}-*.part"
        for part in place.parent.glob(begun):
            part.unlink(missing_ok=True)

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self._root).free
        if free - size < ROOM_BYTES:
            raise OSError(
                f"the coordinator's disk has {free / 2**30:.1f} GiB left at {self._root}, and {ROOM_BYTES / 2**30:.0f} GiB stay "
                "free; make room there, or name another place with checkpoint.uri"
            )
