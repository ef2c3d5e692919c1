"""Digests of the state that this node holds, taken beside training: of each bucket, and of a stage's together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakKeyDictionary

from blake3 import blake3

from dtfm.node.host.cuda_streams import Beside, after
from dtfm.node.model.bucket import Bucket
from dtfm.protos.control_pb2 import BucketState


class StateDigests:
    """Digests of buckets as of one step, taken in a thread of their own. For the thread that changes the buckets, and only once
    the digests of their last state are known."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "digest")
        self._step = -1
        self._known = WeakKeyDictionary[Bucket, Future[tuple[bytes, bytes]]]()

    def begin(self, step: int, buckets: Iterable[Bucket]) -> None:
        """Begins to take the digests of the buckets' present state, after ``step``. Digests that are taken already are not taken
        again."""
        if step != self._step:
            self._step = step
            self._known.clear()
        for bucket in buckets:
            if bucket not in self._known:
                self._known[bucket] = self._thread.submit(_digest, bucket, after(bucket.home))

    def of(self, buckets: Iterable[Bucket]) -> list[BucketState]:
        """The digests for PlanReady, once they are taken; `begin` has been called."""
        known = ((each, self._known[each].result()) for each in buckets)
        return [BucketState(bucket=b.spec.index, digest=d[0], shared=d[1], donors=b.donors) for b, d in known]

    def of_stage(self, buckets: Mapping[int, Bucket]) -> bytes:
        """BLAKE3 (32 bytes) of the digests of a stage's buckets in ascending order, once they are taken, which has begun."""
        return blake3(b"".join(self._known[bucket].result()[0] for bucket in buckets.values())).digest()

    def close(self) -> None:
        self._thread.shutdown()


def _digest(bucket: Bucket, changed: Beside) -> tuple[bytes, bytes]:
    with changed():
        return bucket.digests()
