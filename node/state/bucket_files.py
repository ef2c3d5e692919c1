"""The files of a snapshot, made from state that training is about to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import Lock

from dtfm.node.model.bucket import Bucket
from dtfm.node.state.snapshot_files import to_file


class BucketFiles:
    """Files of ``buckets`` as they are now, each made when it is taken, or else just before the state changes.

    So while writing keeps up with training, there is at most one file in memory beside the state, and training waits for
    none. Training never fails because a file cannot be made: `take` returns the error in its place.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._lock = Lock()
        self._unmade = deque(buckets)
        self._made: deque[tuple[int, bytes | Exception]] = deque()

    def take(self) -> tuple[int, bytes | Exception] | None:
        """The next bucket's index and its file's content, or why there is none; None when all are taken."""
        with self._lock:
            if self._made:
                return self._made.popleft()
            if not self._unmade:
                return None
            return _make(self._unmade.popleft())

    def finish(self) -> None:
        """Makes all that are not taken. To be called before the state changes."""
        with self._lock:
            while self._unmade:
                self._made.append(_make(self._unmade.popleft()))

    def drop(self) -> None:
        """Frees all that are not taken."""
        with self._lock:
            self._unmade.clear()
            self._made.clear()


def _make(bucket: Bucket) -> tuple[int, bytes | Exception]:
    try:
        return bucket.spec.index, to_file(bucket)
    except Exception as error:  # out of memory, for one
        return bucket.spec.index, error
