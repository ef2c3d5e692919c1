"""This node's part in backups: the run's state as of some step, spread over the nodes' own disks, for whoever loses it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from blake3 import blake3

from dtfm.node.bucket import Bucket, BucketSpec
from dtfm.node.checkpoint import load_file, most_bytes, to_file
from dtfm.node.disk import Disk
from dtfm.node.fetching import Wanted, fetch
from dtfm.node.profile import run_dtype
from dtfm.protos.control_pb2 import Keep, Kept, NodeMessage, Part, Peer
from dtfm.protos.credentials import Identity
from dtfm.protos.plan_pb2 import Run

log = logging.getLogger(__name__)


class BackupError(OSError):
    """A part of a backup cannot be had, or read."""


class Keeper:
    """Keeps on ``disk`` what the coordinator wants there. ``report`` takes a message for it."""

    def __init__(self, disk: Disk, report: Callable[[NodeMessage], None]) -> None:
        self.disk = disk
        self._report = report
        self._thread = ThreadPoolExecutor(1, "backup")  # alone changes what is on disk
        self._run = Run()
        self._specs: tuple[BucketSpec, ...] = ()
        self._identity: Identity | None = None
        self._writing: Future[None] | None = None
        self._fetching: asyncio.Task[object] | None = None
        self._whole = 0
        self._closed = False

    def open(self, run: Run, specs: Iterable[BucketSpec], identity: Identity) -> list[Kept]:
        """From now on it is about this run, whose model has buckets like ``specs``. Returns what is on disk of its backups, be it
        of an earlier process of this node."""
        self._run, self._specs, self._identity = run, tuple(specs), identity
        self._thread.submit(self.disk.open, run.id).result()
        return [
            Kept(step=step, parts=[Part(bucket=bucket, size_bytes=size) for bucket, size in files.items()])
            for step, files in self.disk.contents.items()
        ]

    def write(self, step: int, buckets: Iterable[Bucket]) -> None:
        """Copies ``buckets`` as they are now and writes them in the background; or says why not."""
        if self._writing is not None and not self._writing.done():
            self._say(Kept(step=step, problem="the one before is still being written"))
            return
        try:
            copies = deque(bucket.snapshot() for bucket in buckets)
        except (MemoryError, RuntimeError) as error:  # as PyTorch names a lack of memory
            self._say(Kept(step=step, problem=_sentence(error)))
            return
        self._writing = self._thread.submit(self._write, step, copies)

    async def keep(self, wanted: Keep) -> None:
        """Removes what is not wanted any more, and fetches what is missing, in the place of what was wanted before."""
        if self._fetching is not None:
            self._fetching.cancel()
        self._fetching = asyncio.current_task()
        self._whole = wanted.whole
        steps = {wanted.whole, wanted.begun}
        await asyncio.wrap_future(self._thread.submit(self.disk.keep, steps))
        if wanted.missing:
            step, peers = wanted.begun, {peer.node: peer for peer in wanted.peers}
            told = Kept(step=step)
            try:
                await self._obtain(step, wanted.missing, peers)
            except Exception as error:
                log.exception("the backup of step %d cannot be had from others", step)
                told.problem = _sentence(error)
            there = self.disk.contents.get(step, {})
            told.parts.extend(part for part in wanted.missing if part.bucket in there)
            self._say(told)

    async def restore(self, step: int, wanted: Sequence[tuple[Bucket, Part]], peers: Mapping[str, Peer]) -> None:
        """Fills the buckets with their state as of ``step``: from this node's disk, or, what is not there, from those that have
        it. Raises BackupError."""
        try:
            await self._obtain(step, [part for _, part in wanted], peers)
            for bucket, _ in wanted:
                where = f"backup of step {step}, bucket {bucket.spec.index}"
                await asyncio.to_thread(load_file, self.disk.read(step, bucket.spec.index), bucket, where)
        except (ValueError, OSError, LookupError) as problem:
            raise BackupError(
                f"the state as of step {step} cannot be had from the nodes' backup: {problem}"
            ) from problem

    def remove(self) -> None:
        """The run is over, or goes on without this node."""
        self._thread.submit(self.disk.remove)

    def close(self) -> None:
        """Waits for the file in hand."""
        self._closed = True
        self._thread.shutdown()

    async def _obtain(self, step: int, parts: Iterable[Part], peers: Mapping[str, Peer]) -> None:
        """Has these parts of the backup of ``step`` on disk: what is not there with the same digest comes from those that have
        it, by way of ``peers``. Raises ValueError for a part that the model cannot have, ConnectionError or OSError for one that
        cannot be had or written."""
        assert self._identity is not None  # who is told of parts has read a run
        most = {spec.index: most_bytes(spec, run_dtype(self._run)) for spec in self._specs}
        missing, here = [], 0
        for part in parts:
            if part.size_bytes > most.get(part.bucket, -1):
                raise ValueError(f"the model has no bucket {part.bucket} whose file has {part.size_bytes} bytes")
            if await asyncio.to_thread(self.disk.has, step, part.bucket, part.digest):
                here += 1
            else:
                missing.append(_missing(self.disk, step, part, [peers[name] for name in part.nodes if name in peers]))
        log.info("of the backup of step %d, %d parts are here, %d come from others", step, here, len(missing))
        for wanted in missing:
            if not wanted.donors:
                raise ConnectionError(f"nobody has bucket {wanted.bucket} of the backup of step {step}")
        if missing:
            await fetch(missing, step, 0, self._identity, self._run.lease_seconds)

    def _write(self, step: int, copies: deque[Bucket]) -> None:
        kept = Kept(step=step)
        try:
            self.disk.keep({self._whole, step})
            while copies and not self._closed:
                bucket = copies.popleft()
                content = to_file(bucket)
                self.disk.write(step, bucket.spec.index, content)
                digest = blake3(content).digest()
                kept.parts.append(Part(bucket=bucket.spec.index, size_bytes=len(content), digest=digest))
        except Exception as error:
            log.exception("the backup of step %d cannot be written", step)
            kept.problem = _sentence(error)
        self._say(kept)

    def _say(self, kept: Kept) -> None:
        self._report(NodeMessage(kept=kept))


def _missing(disk: Disk, step: int, part: Part, donors: list[Peer]) -> Wanted:
    received = bytearray()

    def take(piece: memoryview, offset: int) -> None:
        del received[offset:]
        received.extend(piece)

    async def finish() -> str:
        content = bytes(received)
        if blake3(content).digest() != part.digest:
            return "its file is not what was written (its BLAKE3 differs)"
        received.clear()
        await asyncio.to_thread(disk.write, step, part.bucket, content)
        return ""

    return Wanted(part.bucket, part.size_bytes, donors, take, finish, backup=True)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
