"""This node's part in the run's snapshots: what it writes, keeps on its own disk, fetches from other disks and goes back to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from io import BytesIO

import torch
from blake3 import blake3

from dtfm.node.model.bucket import Bucket
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.precision import run_dtype
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import load_file, most_bytes
from dtfm.node.state.snapshot_writer import FREE_MEMORY_FRACTION, SnapshotWriter, check_memory, in_one_sentence
from dtfm.node.state.transfer import ASKED_AT_ONCE, Wanted, fetch
from dtfm.protos.control_pb2 import DISKS, KeepSnapshots, NodeMessage, Part, Peer, SnapshotParts

log = logging.getLogger(__name__)

MOST_STEPS_REPORTED = 4
"""The newest steps on disk that are reported. There are more than two only if some could not be removed."""


class SnapshotDamaged(OSError):
    """A part of a snapshot is damaged on every disk that should have it, or is of another model."""


class Snapshots:
    """``report`` takes a message for the coordinator. ``writer`` writes; the rest is about the snapshots on ``disk``."""

    def __init__(self, disk: Disk, report: Callable[[NodeMessage], None]) -> None:
        self.disk = disk
        self.writer = SnapshotWriter(disk, report)
        self._loaded: LoadedRun | None = None
        self._fetching: asyncio.Task[object] | None = None

    def renew(self, loaded: LoadedRun) -> None:
        """Later connections are made by its dialler."""
        if self._loaded is not None:
            self._loaded = loaded

    def open(self, loaded: LoadedRun) -> list[SnapshotParts]:
        """Starts using this run's snapshots. Returns what is on disk of its snapshots, also from an earlier process of this
        node."""
        opened = self._loaded is not None and self._loaded.run.id == loaded.run.id
        self._loaded = loaded
        try:
            if not opened:  # else the writer may be busy with this run
                self.writer.submit(lambda: self.disk.open(loaded.run.id)).result()
            contents = self.disk.contents
        except OSError as error:
            log.warning("the snapshots on this node's disk cannot be read: %s", error)
            return []
        known = range(len(loaded.model.buckets))
        return [
            SnapshotParts(
                step=step,
                destination=DISKS,
                parts=[Part(bucket=index, size_bytes=size) for index, size in files.items() if index in known],
            )
            for step, files in sorted(contents.items())[-MOST_STEPS_REPORTED:]
        ]

    async def keep(self, wanted: KeepSnapshots) -> None:
        """Removes the snapshots that are not wanted any more, and fetches the parts that are missing.

        A later call cancels this one.
        """
        before, self._fetching = self._fetching, asyncio.current_task()
        if before not in (None, self._fetching):
            before.cancel()
        step = wanted.under_way
        told = SnapshotParts(step=step, destination=DISKS)

        def put(part: Part, content: bytes) -> None:
            self.disk.write(step, part.bucket, content)
            told.parts.append(part)

        try:
            await asyncio.wrap_future(self.writer.submit(lambda: self.disk.keep(wanted.whole, step)))
            missing = []
            for part in wanted.missing:
                if await asyncio.to_thread(self.disk.find, step, part.bucket, part.digest) is None:
                    missing.append(part)
                else:
                    told.parts.append(part)
            await self._fetch(step, missing, wanted.peers, put, FREE_MEMORY_FRACTION)
        except Exception as error:
            log.exception("parts of the snapshot of step %d cannot be fetched", step)
            told.problem = in_one_sentence(error)
        if wanted.missing:
            self.writer.tell(told)

    async def restore(self, step: int, wanted: Mapping[int, tuple[Bucket, Part]], peers: Iterable[Peer]) -> None:
        """Fills the buckets, by index, with their state as of ``step``: from this node's disk where it has the file with that
        digest, else from the disks of ``peers``.

        Raises:
            SnapshotDamaged: a part is damaged on every disk that should have it.
            ConnectionError: the nodes that have a part are out of reach.
            OSError, MemoryError: this node lacks the room.
        """

        def load(part: Part, content: bytes) -> None:
            load_file(content, wanted[part.bucket][0], f"snapshot of step {step}, bucket {part.bucket}")

        def put(part: Part, content: bytes) -> None:
            load(part, content)
            with suppress(OSError):  # it is in memory all the same
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
            log.info("snapshot of step %d: %d buckets are on this disk, %d come from others", step, here, len(missing))
            await self._fetch(step, missing, peers, put, 1.0)
        except ConnectionError as error:
            raise ConnectionError(f"the snapshot of step {step} is out of reach: {error}") from error
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the node that wrote it may have written anything
            raise SnapshotDamaged(f"the snapshot of step {step} cannot be read: {error}") from error

    def remove(self) -> None:
        """Removes this run's snapshots from the disk. To be called on the event loop."""
        if self._fetching is not None:
            self._fetching.cancel()
        self.writer.submit(self.disk.remove)

    async def _fetch(
        self,
        step: int,
        parts: Iterable[Part],
        peers: Iterable[Peer],
        put: Callable[[Part, bytes], None],
        memory_fraction: float,
    ) -> None:
        """Fetches files from the disks of ``peers``; each goes to ``put``, in a thread.

        Raises:
            ValueError: the model cannot have such a file, or it is damaged everywhere.
            ConnectionError: the nodes that have a file are out of reach.
            OSError: it would take more than ``memory_fraction`` of the host's free memory.
        """
        assert self._loaded is not None  # the coordinator names parts only to a node that has loaded the run
        run, dialler = self._loaded.run, self._loaded.dialler
        most = {spec.index: most_bytes(spec, run_dtype(run)) for spec in self._loaded.model.buckets}
        by_name = {peer.node: peer for peer in peers}
        wanted = []
        for part in parts:
            if part.size_bytes > most.get(part.bucket, -1):
                raise ValueError(f"the model has no bucket {part.bucket} whose file has {part.size_bytes} bytes")
            donors = [by_name[name] for name in part.nodes if name in by_name]
            file = _IncomingFile(part, put)
            wanted.append(Wanted(part.bucket, part.size_bytes, donors, file.take, file.finish, from_snapshot=True))
        at_once = ASKED_AT_ONCE * len({donor.node for item in wanted for donor in item.donors})
        check_memory(sum(sorted((item.size_bytes for item in wanted), reverse=True)[:at_once]), memory_fraction)
        await fetch(wanted, step, 0, dialler, run.lease_seconds)


class _IncomingFile:
    """A file that arrives in pieces and is digested as it does. When it is whole and sound it goes to ``put``, in a thread."""

    def __init__(self, part: Part, put: Callable[[Part, bytes], None]) -> None:
        self._part = part
        self._put = put
        self._received = BytesIO()
        self._digest = blake3()

    def take(self, piece: memoryview, offset: int) -> None:
        """The next piece, or an earlier one again, from which the rest follows."""
        if offset < self._received.tell():
            self._go_back(offset)
        self._received.write(piece)
        self._digest.update(piece)

    async def finish(self) -> str:
        """As `Wanted.finish`."""
        if self._digest.digest() != self._part.digest:
            self._go_back(0)
            return "its file is damaged (its BLAKE3 differs)"
        content = self._received.getvalue()  # no copy
        self._received.close()
        await asyncio.to_thread(self._put, self._part, content)
        return ""

    def _go_back(self, offset: int) -> None:
        self._received.seek(offset)
        self._received.truncate()
        self._digest.reset()
        self._digest.update(self._received.getvalue())
