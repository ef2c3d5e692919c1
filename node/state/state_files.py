"""The files of a checkpoint or backup, made from state that training is about to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import Lock

from dtfm.node.model.bucket import Bucket
from dtfm.node.state.checkpoint import to_file


class StateFiles:
    """Files of ``buckets`` as they are now: one is made when it is taken, in the thread that writes it, or else just before the
    state changes. So where writing keeps up with training, there is never more than one beside the state, and training does
    not wait for any. Training never fails for a file that cannot be made: who takes it gets the error in its place."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._lock = Lock()
        self._unmade = deque(buckets)
        self._made: deque[tuple[int, bytes | Exception]] = deque()

    def take(self) -> tuple[int, bytes | Exception] | None:
        """A bucket's index and its file's content, or why there is none, in turn; None when all are taken."""
        with self._lock:
            if self._made:
                return self._made.popleft()
            if not self._unmade:
                return None
            return _make(self._unmade.popleft())

    def finish(self) -> None:
        """The state is about to change: makes all that are not taken."""
        with self._lock:
            while self._unmade:
                self._made.append(_make(self._unmade.popleft()))

    def drop(self) -> None:
        """None of the others will be taken."""
        with self._lock:
            self._unmade.clear()
            self._made.clear()


def _make(bucket: Bucket) -> tuple[int, bytes | Exception]:
    try:
        return bucket.spec.index, to_file(bucket)
    except Exception as error:  # out of memory, say
        return bucket.spec.index, error
