"""Files in places that several nodes reach: any fsspec URL."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from contextlib import suppress

from dtfm.node.data.reaching import open_place, withheld
from dtfm.protos.checkpoint_names import marker_file
from dtfm.protos.places import COORDINATOR, LOCAL, told_by

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Bytes of a large file that are in memory at a time."""

UPLOAD_BYTES = 16 << 20
"""Bytes that an object store is sent at a time. S3 takes at most 10,000 such parts of a file."""


class NewFile:
    """A file that is written piece by piece. After `finish` the whole file is there, without it no part, even if two nodes
    write the same file at the same time.

    A context. At its end the file is discarded unless it is finished. All methods raise OSError, or another exception of the
    file system, if writing fails.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._fs, path = open_place(folder)
        self._fs.makedirs(path, exist_ok=True)
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._is_local = bool(protocols & LOCAL)  # else an object store, which shows whole objects only
        self._final = f"{path.rstrip('/')}/{name}"
        self._target = f"{self._final}.{uuid.uuid4().hex}.part" if self._is_local else self._final
        self._file = self._fs.open(self._target, "wb", block_size=UPLOAD_BYTES)
        self._open = True

    def write(self, piece: bytes | memoryview) -> None:
        self._file.write(piece)

    def finish(self) -> None:
        if self._is_local:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if self._is_local:
            self._fs.mv(self._target, self._final)
        self._open = False

    def discard(self) -> None:
        """Removes the unfinished file. Raises nothing."""
        if not self._open:
            return
        self._open = False
        with suppress(Exception):
            if self._is_local:
                with suppress(Exception):  # closing writes what is buffered
                    self._file.close()
                self._fs.rm_file(self._target)
            else:  # to close it would make the object
                self._file.discard()
                self._file.closed = True

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def check_place(folder: str, run_id: str, node: str) -> None:
    """Raises ValueError unless the coordinator keeps the run's checkpoints in ``folder``, and this node can write there.
    Trouble that may pass is only logged."""
    if folder.startswith(("memory:", COORDINATOR)):
        return
    with withheld("checkpoint.uri", folder):
        _check_place(folder, run_id, node)


def _check_place(folder: str, run_id: str, node: str) -> None:
    try:
        fs, path = open_place(folder)
        fs.invalidate_cache()
        if not fs.exists(f"{path.rstrip('/')}/{marker_file(run_id)}"):
            raise ValueError(
                f"checkpoint.uri = {folder} is not the same place on this machine as on the coordinator's: it lacks the file "
                f"{marker_file(run_id)}, which the coordinator has written. Mount that place here too, or leave checkpoint.uri "
                "out of the run file: then checkpoints go to the coordinator's disk"
            )
        write(folder, marker_file(run_id, node), b"")
    except (OSError, ImportError) as error:
        why = told_by(folder, error)
        if isinstance(error, PermissionError | ImportError) or error.errno in (errno.EROFS, errno.ENOSPC):
            raise ValueError(f"checkpoint.uri = {folder} cannot be used from this machine: {why}") from None
        log.warning("checkpoint.uri = %s cannot be reached now: %s", folder, why)


def write(folder: str, name: str, content: bytes | memoryview) -> None:
    """Writes a small file; see NewFile."""
    with NewFile(folder, name) as file:
        file.write(content)
        file.finish()
