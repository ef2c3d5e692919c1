"""This node's part in backups: the run's state as of some step, spread over the nodes' own disks, for whoever loses it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO

import torch
from blake3 import blake3

from dtfm.node.host.device import free_memory
from dtfm.node.model.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.workload import run_dtype
from dtfm.node.state.checkpoint import load_file, most_bytes
from dtfm.node.state.disk import Disk
from dtfm.node.state.state_files import StateFiles
from dtfm.node.state.transfer import ASKED_AT_ONCE, Wanted, fetch
from dtfm.protos.control_pb2 import Keep, Kept, NodeMessage, Part, Peer
from dtfm.protos.credentials import Identity
from dtfm.protos.plan_pb2 import Run

log = logging.getLogger(__name__)

MOST_TOLD = 4
"""Of so many steps what is on disk is told: of the newest. More than two are there only where some could not be removed."""

MEMORY_SHARE = 0.5
"""Of the host's free memory: so much may be taken by files that are being written."""


class BackupError(OSError):
    """A part of a backup is not what was written, with whoever has it, or is of another model."""


class Keeper:
    """Keeps on ``disk`` what the coordinator wants there. ``report`` takes a message for it."""

    def __init__(self, disk: Disk, report: Callable[[NodeMessage], None]) -> None:
        self.disk = disk
        self._report = report
        self._thread = ThreadPoolExecutor(1, "backup")
        self._run = Run()
        self._specs: tuple[BucketSpec, ...] = ()
        self._identity: Identity | None = None
        self._writing: StateFiles | None = None
        self._fetching: asyncio.Task[object] | None = None
        self._whole = 0
        self._closed = False

    def open(self, run: Run, specs: Iterable[BucketSpec], identity: Identity) -> list[Kept]:
        """From now on it is about this run, whose model has buckets like ``specs``. Returns what is on disk of its backups, be it
        of an earlier process of this node."""
        opened = self._identity is not None and run.id == self._run.id
        self._run, self._specs, self._identity = run, tuple(specs), identity
        try:
            if not opened:  # else the thread may be busy writing for it
                self._thread.submit(self.disk.open, run.id).result()
            contents = self.disk.contents
        except OSError as error:
            log.warning("this node's part of earlier backups cannot be read: %s", error)
            return []
        known = {spec.index for spec in self._specs}
        return [
            Kept(
                step=step,
                parts=[Part(bucket=index, size_bytes=size) for index, size in files.items() if index in known],
            )
            for step, files in sorted(contents.items())[-MOST_TOLD:]
        ]

    def write(self, step: int, buckets: Collection[Bucket]) -> None:
        """Writes ``buckets`` as they are now, in the background; or says why not."""
        files = StateFiles(buckets)
        try:
            self._check_room(sum(bucket_bytes(b.spec, b.parameters.dtype) for b in buckets))
            self._writing = files
            self._thread.submit(self._write, step, files)
        except Exception as error:  # training goes on all the same
            if self._writing is files:
                self._writing = None
            self._say(Kept(step=step, problem=_sentence(error)))

    def state_changes(self) -> None:
        """To be called before it does."""
        if (files := self._writing) is not None:
            files.finish()

    async def keep(self, wanted: Keep) -> None:
        """Removes what is not wanted any more, and fetches what is missing, in the place of what was wanted before."""
        before, self._fetching = self._fetching, asyncio.current_task()
        if before not in (None, self._fetching):
            before.cancel()
        self._whole, step = wanted.whole, wanted.begun
        told = Kept(step=step)

        def put(part: Part, content: bytes) -> None:
            self.disk.write(step, part.bucket, content)
            told.parts.append(part)

        try:
            await asyncio.wrap_future(self._thread.submit(self.disk.keep, {wanted.whole, step}))
            missing = []
            for part in wanted.missing:
                if await asyncio.to_thread(self.disk.find, step, part.bucket, part.digest) is None:
                    missing.append(part)
                else:
                    told.parts.append(part)
            await self._fetch(step, missing, wanted.peers, put, MEMORY_SHARE)
        except Exception as error:
            log.exception("what is wanted of the backup of step %d cannot be kept", step)
            told.problem = _sentence(error)
        if wanted.missing:
            self._say(told)

    async def restore(self, step: int, wanted: Mapping[int, tuple[Bucket, Part]], peers: Iterable[Peer]) -> None:
        """Fills the buckets, by index, with their state as of ``step``: from this node's disk, or, what is not there with the
        same digest, from those that have it. Raises BackupError where that is damaged, ConnectionError where who has it is out
        of reach, and OSError or MemoryError where this node lacks the room."""

        def load(part: Part, content: bytes) -> None:
            load_file(content, wanted[part.bucket][0], f"backup of step {step}, bucket {part.bucket}")

        def put(part: Part, content: bytes) -> None:
            load(part, content)
            with suppress(OSError):  # it is here all the same
                self.disk.write(step, part.bucket, content)

        try:
            missing = []
            for _, part in wanted.values():
                content = await asyncio.to_thread(self.disk.find, step, part.bucket, part.digest)
                if content is None:
                    missing.append(part)
                else:
                    await asyncio.to_thread(load, part, content)
            here = len(wanted) - len(missing)
            log.info(
                "the backup of step %d: %d buckets are on disk here, %d come from others", step, here, len(missing)
            )
            await self._fetch(step, missing, peers, put, 1.0)
        except ConnectionError as error:
            raise ConnectionError(f"the backup of step {step} cannot be had: {error}") from error
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whoever wrote it may have written anything
            raise BackupError(f"the state as of step {step} cannot be had from the nodes' backup: {error}") from error

    def remove(self) -> None:
        """The run is over, or goes on without this node. On the event loop."""
        if self._fetching is not None:
            self._fetching.cancel()
        self._thread.submit(self.disk.remove)

    def close(self) -> None:
        """Waits for the file in hand."""
        self._closed = True
        self._thread.shutdown()

    async def _fetch(
        self,
        step: int,
        parts: Iterable[Part],
        peers: Iterable[Peer],
        put: Callable[[Part, bytes], None],
        memory_share: float,
    ) -> None:
        """Each file goes to ``put``, in a thread. Raises ValueError for one that the model cannot have or that is damaged,
        ConnectionError for one that cannot be had, OSError where that takes more than ``memory_share`` of the host's free memory,
        and what ``put`` raises."""
        assert self._identity is not None  # who is told of parts has read a run
        most = {spec.index: most_bytes(spec, run_dtype(self._run)) for spec in self._specs}
        by_name = {peer.node: peer for peer in peers}
        wanted = []
        for part in parts:
            if part.size_bytes > most.get(part.bucket, -1):
                raise ValueError(f"the model has no bucket {part.bucket} whose file has {part.size_bytes} bytes")
            donors = [by_name[name] for name in part.nodes if name in by_name]
            incoming = _Incoming(part, put)
            wanted.append(Wanted(part.bucket, part.size_bytes, donors, incoming.take, incoming.finish, backup=True))
        at_once = ASKED_AT_ONCE * len({donor.node for item in wanted for donor in item.donors})
        _check_memory(sum(sorted((item.size_bytes for item in wanted), reverse=True)[:at_once]), memory_share)
        await fetch(wanted, step, 0, self._identity, self._run.lease_seconds)

    def _check_room(self, size_bytes: int) -> None:
        """Raises OSError where so much cannot be copied and written now."""
        if self._writing is not None:
            raise OSError("the one before is still being written")
        _check_memory(size_bytes, MEMORY_SHARE)
        self.disk.check_room(size_bytes)

    def _write(self, step: int, files: StateFiles) -> None:
        kept = Kept(step=step)
        try:
            self.disk.keep({self._whole, step})
            while not self._closed and (file := files.take()) is not None:
                bucket, content = file
                if isinstance(content, Exception):
                    raise content
                self.disk.write(step, bucket, content)
                digest = blake3(content).digest()
                kept.parts.append(Part(bucket=bucket, size_bytes=len(content), digest=digest))
        except Exception as error:
            log.exception("the backup of step %d cannot be written", step)
            kept.problem = _sentence(error)
        files.drop()
        self._writing = None
        self._say(kept)

    def _say(self, kept: Kept) -> None:
        self._report(NodeMessage(kept=kept))


class _Incoming:
    """A file as it comes, digested piece by piece; whole and sound it goes to ``put``, in a thread."""

    def __init__(self, part: Part, put: Callable[[Part, bytes], None]) -> None:
        self._part = part
        self._put = put
        self._received = BytesIO()
        self._digest = blake3()

    def take(self, piece: memoryview, offset: int) -> None:
        if offset < self._received.tell():
            self._go_back(offset)
        self._received.write(piece)
        self._digest.update(piece)

    async def finish(self) -> str:
        """As in Wanted."""
        if self._digest.digest() != self._part.digest:
            self._go_back(0)
            return "its file is not what was written (its BLAKE3 differs)"
        content = self._received.getvalue()  # no copy
        self._received.close()
        await asyncio.to_thread(self._put, self._part, content)
        return ""

    def _go_back(self, offset: int) -> None:
        self._received.seek(offset)
        self._received.truncate()
        self._digest.reset()
        self._digest.update(self._received.getvalue())


def _check_memory(size_bytes: int, share: float) -> None:
    """Raises OSError where that is more than ``share`` of what is free."""
    free = free_memory(torch.device("cpu"))
    if size_bytes > share * free:
        raise OSError(f"copies of {size_bytes} bytes are too much for {free} bytes of free memory")


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
