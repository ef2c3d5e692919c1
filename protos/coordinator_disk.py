"""The coordinator's disk as a file system of fsspec, for runs that name no other storage: URLs like coordinator://disk/step-00000100.

It is reached over connections of its own, apart from the control stream. While the coordinator is away, whoever writes or reads
waits for it.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future
from threading import Event, Lock
from typing import Any

import fsspec
import grpc
from fsspec.spec import AbstractBufferedFile

from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.connection import channel_options
from dtfm.protos.identity.credentials import to_coordinator
from dtfm.protos.identity.enrolment import Opened
from dtfm.protos.places import COORDINATOR, COORDINATORS_DISK

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10
BLOCK_BYTES = 1 << 20
"""Of a file that are sent at a time. What writes slowly, to spare the line, would send larger ones in bursts."""
MOST_AT_ONCE = 8
"""Pieces under way: the coordinator reads a stream 64 KiB at a time, so that one alone would be slow over a far link."""
CALL_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
"""How long a coordinator may be away before a file is given up."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0
_AWAY = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "CANCELLED"}
"""Answers of a coordinator that is not there. CANCELLED: the line leads elsewhere now."""


class Line:
    """The connection of this process to its coordinator's disk, over the last way by which it was reached."""

    def __init__(self) -> None:
        self.closing = Event()
        """Set when this process is to end: whatever meets a coordinator that is away then fails at once."""
        self._lock = Lock()
        self._opened: Opened | None = None
        self._channel: grpc.Channel | None = None

    def lead_to(self, opened: Opened) -> None:
        """From now on the file system is the disk of the coordinator that was reached in this way."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._opened, self._channel = opened, None

    def call(self, method: str, request: Any) -> Future[Any]:
        """Begins a call. Raises OSError if no coordinator was reached yet."""
        with self._lock:
            if self._opened is None:
                raise OSError("the coordinator was not reached yet")
            if self._channel is None:
                credentials, named = to_coordinator(self._opened.authority)
                options = (*channel_options(CALL_SECONDS), *named, ("grpc.enable_http_proxy", 0))
                self._channel = grpc.secure_channel(self._opened.address, credentials, options=options)
            stub = services.stub("Disk", self._channel)
            call: Future[Any] = getattr(stub, method).future(
                request, metadata=self._opened.metadata, timeout=CALL_SECONDS
            )
            return call


LINE = Line()


def _answer(method: str, request: Any, begun: Future[Any] | None = None) -> Any:
    """What the coordinator answers; while it is away, it is asked again. Raises OSError. ``begun``: the first attempt."""
    until, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE_SECONDS
    while True:
        try:
            return (begun or LINE.call(method, request)).result()
        except grpc.RpcError as error:
            code, begun = error.code(), None
            sentence = f"the coordinator's disk: {error.details()}"
            if code is grpc.StatusCode.NOT_FOUND:
                raise FileNotFoundError(sentence) from None
            if code is grpc.StatusCode.PERMISSION_DENIED:
                raise PermissionError(sentence) from None
            if code.name not in _AWAY or time.monotonic() > until:
                raise OSError(sentence) from None
        if LINE.closing.is_set():
            raise OSError(f"{sentence}; this node is stopping, and does not wait for it")
        log.warning("%s; trying again in %.1f s", sentence, pause)
        LINE.closing.wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class CoordinatorDisk(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """See above. It has no folders to make, and deletes nothing: the coordinator does."""

    protocol = COORDINATOR
    cachable = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        found = _answer("Look", wire.LookRequest(path=self._strip_protocol(path))).entries
        entries = [
            {"name": each.path, "size": each.size_bytes, "type": "directory" if each.is_folder else "file"}
            for each in found
        ]
        return entries if detail else [entry["name"] for entry in entries]

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> File:
        return File(self, path, mode, min(block_size or PIECE_BYTES, BLOCK_BYTES), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix(COORDINATORS_DISK).strip("/")


class File(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is read, or a new one that is there once it is closed."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        pieces = []
        while start < end:
            request = wire.GetRequest(path=self.path, offset=start, length=end - start)
            if not (data := _answer("Get", request).data):
                break
            pieces.append(data)
            start += len(data)
        return b"".join(pieces)

    def _initiate_upload(self) -> None:
        self._upload = os.urandom(16)
        # Alone: who has not been let in by a first call may not make many at once.
        _answer("Put", wire.PutRequest(path=self.path, upload=self._upload))

    def _upload_chunk(self, final: bool = False) -> bool:
        data, begun = self.buffer.getbuffer(), list[tuple[wire.PutRequest, Future[Any]]]()
        for first in range(0, len(data), PIECE_BYTES):
            piece = bytes(data[first : first + PIECE_BYTES])
            put = wire.PutRequest(path=self.path, upload=self._upload, offset=self.offset + first, data=piece)
            begun.append((put, LINE.call("Put", put)))
            if len(begun) == MOST_AT_ONCE:
                oldest, call = begun.pop(0)
                _answer("Put", oldest, call)
        for put, call in begun:
            _answer("Put", put, call)
        size = self.offset + len(data)
        del data
        if final:
            _answer("Put", wire.PutRequest(path=self.path, upload=self._upload, offset=size, last=True))
        return True


fsspec.register_implementation(COORDINATOR, CoordinatorDisk, clobber=True)
