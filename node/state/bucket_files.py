"""The files of a snapshot, made piece by piece from state that training is about to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Lock
from typing import BinaryIO

from dtfm.node.data.storage import PIECE_BYTES
from dtfm.node.host.cuda_streams import after
from dtfm.node.host.device import free_memory
from dtfm.node.model.bucket import HOST, Bucket, bucket_bytes
from dtfm.node.state.snapshot_files import file_header

FREE_MEMORY_FRACTION = 0.5
"""Copies of what is not written yet take at most this fraction of the host's free memory."""


@dataclass(frozen=True, slots=True)
class BucketFile:
    """A file of ``size_bytes`` to be written. ``pieces`` raises what has kept the state from being copied in time."""

    bucket: int
    size_bytes: int
    pieces: Iterator[bytes | memoryview]


class BucketFiles:
    """Files of ``buckets`` as they are now.

    While writing keeps up with training, a piece at a time is in memory beside the state, and training waits for none. Just
    before the state changes, what is not written yet is copied: to memory, as far as that has room (FREE_MEMORY_FRACTION), else
    to files of ``scratch``, which takes their size. Where neither has room the files are lost, and training goes on.
    """

    def __init__(self, buckets: Iterable[Bucket], scratch: Callable[[int], BinaryIO]) -> None:
        """In the thread that changes the state, as `keep`."""
        self._scratch = scratch
        self._lock = Lock()
        self._left = deque(_State(bucket, after(bucket.parameters)) for bucket in buckets)  # the first is being written
        self._error: Exception | None = None
        self._begun = False

    def take(self) -> BucketFile | None:
        """The next file, when the one before is written; None when all are."""
        with self._lock:
            if self._begun and self._left:
                self._left.popleft().close()
            self._begun = True
            if self._error is not None:
                raise self._error
            if not self._left:
                return None
            state = self._left[0]
        return BucketFile(state.index, len(state.header) + state.end, self._pieces(state))

    def keep(self) -> None:
        """To be called before the state changes: copies what is not written yet. Raises nothing."""
        with self._lock:
            try:
                room = int(FREE_MEMORY_FRACTION * free_memory(HOST))
                for state in self._left:
                    room -= state.keep(room, self._scratch)
            except Exception as error:  # out of memory, for one
                self._drop()
                self._error = error

    def drop(self) -> None:
        """Frees all that is kept."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        while self._left:
            self._left.popleft().close()

    def _pieces(self, state: _State) -> Iterator[bytes | memoryview]:
        yield state.header
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                piece = state.take()
            if not piece:
                return
            yield piece


class _State:
    """One bucket's state, of which bytes [0, taken) are taken; the rest is in the bucket, or was kept. Then the bucket is let
    go: the node may have another stage by now."""

    def __init__(self, bucket: Bucket, ready: AbstractContextManager[object]) -> None:
        self.index = bucket.spec.index
        self.header = file_header(bucket.spec, bucket.parameters.dtype)
        self.end = bucket_bytes(bucket.spec, bucket.parameters.dtype)
        self._bucket: Bucket | None = bucket
        self._ready = ready  # to read it without waiting for what is computed meanwhile
        self._taken = 0
        self._kept: memoryview | BinaryIO | None = None
        self._kept_from = 0

    def take(self) -> memoryview:
        """The next piece; empty at the end."""
        stop = min(self._taken + PIECE_BYTES, self.end)
        if self._kept is None:
            assert self._bucket is not None
            with self._ready:
                piece = self._bucket.read(self._taken, stop)
        elif isinstance(self._kept, memoryview):
            piece = self._kept[self._taken - self._kept_from : stop - self._kept_from]
        else:
            piece = memoryview(self._kept.read(stop - self._taken))
        self._taken = stop
        return piece

    def keep(self, room: int, scratch: Callable[[int], BinaryIO]) -> int:
        """Copies what is left, unless that is done: to memory if ``room`` bytes are enough. Returns the bytes of that.

        Raises OSError if there is no room on the disk either.
        """
        left, bucket = self.end - self._taken, self._bucket
        if self._kept is not None or bucket is None or not left:
            return 0
        if left <= room:
            self._kept, self._kept_from = bucket.read(self._taken, self.end), self._taken
            self._bucket = None
            return left
        try:
            file = self._kept = scratch(left)
            for begin in range(self._taken, self.end, PIECE_BYTES):
                file.write(bucket.read(begin, min(begin + PIECE_BYTES, self.end)))
            file.seek(0)
            self._bucket = None
        except OSError as error:
            raise OSError(
                f"the state of bucket {self.index} was about to change before it was written, and {left} bytes of "
                f"it fit neither in memory, of which {max(0, room)} bytes may be used, nor on this node's disk ({error}); give "
                "the node more memory or --snapshots on a larger disk, or write snapshots to a faster place"
            ) from error
        return 0

    def close(self) -> None:
        if self._kept is not None and not isinstance(self._kept, memoryview):
            self._kept.close()
        self._kept, self._bucket = memoryview(b""), None
        self._taken = self.end
