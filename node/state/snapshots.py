"""This node's part in the run's snapshots: it writes them, keeps them on its own disk, fetches parts from other disks, goes back
to them, and sends them to the run's place for checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

import torch
from blake3 import blake3

from dtfm.node.data.problems import sentence_of
from dtfm.node.data.shared.storage import NewFile
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.precision import run_dtype
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import Loading, SnapshotDamaged, file_bytes
from dtfm.node.state.snapshot_writer import SnapshotWriter
from dtfm.node.state.transfer import Wanted, fetch
from dtfm.node.state.uploads import Uploads
from dtfm.protos.control_pb2 import Keep, Move, Moved, NodeMessage, Part, Peer

log = logging.getLogger(__name__)

MOST_STEPS_REPORTED = 4
"""The newest steps on disk that are reported: a node keeps no more."""


class Snapshots:
    """``report`` takes a message for the coordinator. ``writer`` writes to ``disk``; the other attributes are for reading it."""

    def __init__(self, disk: Disk, report: Callable[[NodeMessage], None]) -> None:
        self.disk = disk
        self.writer = SnapshotWriter(disk, report)
        self._uploads = Uploads(disk, report)
        self._loaded: LoadedRun | None = None
        self._fetching = set[asyncio.Task[object]]()
        self._fetching_step = 0

    @property
    def free_bytes(self) -> int:
        """On the disk; 0: that is not known."""
        try:
            return self.disk.free_bytes
        except OSError:
            return 0

    def open(self, loaded: LoadedRun) -> list[Moved]:
        """Starts using this run's snapshots. Returns the parts on this disk, also from an earlier process of this
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
            Moved(
                step=step,
                parts=[Part(bucket=index, size_bytes=size) for index, size in files.items() if index in known],
            )
            for step, files in sorted(contents.items())[-MOST_STEPS_REPORTED:]
        ]

    async def keep(self, wanted: Keep) -> None:
        """Removes the snapshots that are no longer wanted, and stops fetching and sending their parts."""
        if self._fetching_step not in wanted.steps:
            self._turn_to(0)
        self._uploads.keep(wanted.steps)
        try:
            await asyncio.wrap_future(self.writer.submit(lambda: self.disk.keep(wanted.steps)))
        except Exception:
            log.exception("old snapshots cannot be removed")

    async def fetch(self, wanted: Move) -> None:
        """Fetches parts of a snapshot to this disk, beside those of it that are on their way, and stops fetching parts of others.
        Reports what has come, and why the rest does not."""
        self._turn_to(wanted.step)
        this = asyncio.current_task()
        assert this is not None
        self._fetching.add(this)
        step, told = wanted.step, Moved(step=wanted.step)
        try:
            missing: list[Part] = []
            for part in wanted.parts:
                here = await asyncio.to_thread(self.disk.has, step, part.bucket, part.digest)
                (told.parts if here else missing).append(part)
            if missing:
                size = sum(part.size_bytes for part in missing)
                # In the writer's thread, where `keep` has removed before what was in the way.
                await asyncio.wrap_future(self.writer.submit(lambda: self.disk.check_room(size)))
            files = [IncomingFile(self.disk, step, part, done=told.parts.append) for part in missing]
            await self._fetch(step, files, wanted.peers)
        except Exception as error:
            log.exception("parts of the snapshot of step %d cannot be fetched", step)
            told.problem = sentence_of(error)
        finally:
            self._fetching.discard(this)
        self.writer.tell(told)

    def _turn_to(self, step: int) -> None:
        """Stops fetching parts of other steps."""
        if step != self._fetching_step:
            self._fetching_step = step
            for task in self._fetching:
                task.cancel()

    async def restore(self, step: int, wanted: Mapping[int, tuple[Bucket, Part]], peers: Iterable[Peer]) -> None:
        """Fills the buckets, by index, with their state as of ``step``: from this node's disk where it has the file with that
        digest, else from the disks of ``peers``.

        After an error the buckets may have anything in them.

        Raises:
            SnapshotDamaged: a part is damaged on every disk that should have it.
            ConnectionError: the nodes that have a part are out of reach.
            OSError, MemoryError: this node lacks the room.
        """
        try:
            missing = []
            for bucket, part in wanted.values():
                if not await asyncio.to_thread(self._load, step, bucket, part):
                    missing.append(part)
            here = len(wanted) - len(missing)
            log.info("snapshot of step %d: %d buckets are on this disk, %d come from others", step, here, len(missing))
            files = [IncomingFile(self.disk, step, part, bucket=wanted[part.bucket][0]) for part in missing]
            await self._fetch(step, files, peers)
        except ConnectionError as error:
            raise ConnectionError(f"the snapshot of step {step} is out of reach: {error}") from error
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the node that wrote it may have written anything
            raise SnapshotDamaged(f"the snapshot of step {step} cannot be read: {error}") from error

    def upload(self, wanted: Move) -> None:
        """Sends files from the disk to the run's place for checkpoints, in the background."""
        assert self._loaded is not None  # it has written them
        self._uploads.send(self._loaded, wanted)

    def close(self) -> None:
        """Waits for the files that are being written."""
        self._uploads.close()
        self.writer.close()

    def run_is_over(self) -> None:
        """Removes this run's snapshots from the disk if its checkpoints have all of the state: otherwise the run could not go on,
        should an operator want more steps. To be called on the event loop."""
        self._turn_to(0)
        if self._loaded is not None and not self._loaded.run.checkpoint.weights:
            self.writer.submit(self.disk.remove)

    def _load(self, step: int, bucket: Bucket, part: Part) -> bool:
        """Whether the part is on this disk, and ``bucket`` now has its content. Raises ValueError if it is of another model."""
        loading = Loading(bucket, named(step, part))
        if not self.disk.has(step, part.bucket, part.digest, loading.take):  # it may be on other disks
            return False
        loading.finish()
        return True

    async def _fetch(self, step: int, files: Iterable[IncomingFile], peers: Iterable[Peer]) -> None:
        """Fetches files from the disks of ``peers``.

        Raises:
            ValueError: the model cannot have such a file, or it is damaged everywhere.
            ConnectionError: the nodes that have a file are out of reach.
            What `IncomingFile.finish` raises.
        """
        assert self._loaded is not None  # the coordinator names parts only to a node that has loaded the run
        run, dialler = self._loaded.run, self._loaded.dialler
        most = {spec.index: file_bytes(spec, run_dtype(run)) for spec in self._loaded.model.buckets}
        by_name = {peer.node: peer for peer in peers}
        with ExitStack() as stack:
            wanted = []
            for file in files:
                part = file.part
                if part.size_bytes > most.get(part.bucket, -1):
                    raise ValueError(f"the model has no bucket {part.bucket} whose file has {part.size_bytes} bytes")
                donors = [by_name[name] for name in part.nodes if name in by_name]
                stack.callback(file.discard)
                wanted.append(Wanted(part.bucket, part.size_bytes, donors, file.take, file.finish, from_snapshot=True))
            await fetch(wanted, step, 0, dialler, run.lease_seconds)


def named(step: int, part: Part) -> str:
    return f"snapshot of step {step}, bucket {part.bucket}"


class IncomingFile:
    """``part``'s file of the snapshot of ``step`` on its way to this node's ``disk`` or, if one is given, into ``bucket``.

    ``done`` is called when it is here, whole and sound. `take` and `finish` are what `Wanted` needs.
    """

    def __init__(
        self,
        disk: Disk,
        step: int,
        part: Part,
        *,
        done: Callable[[Part], object] = lambda _: None,
        bucket: Bucket | None = None,
    ) -> None:
        self.part = part
        self._disk, self._step, self._bucket = disk, step, bucket
        self._done = done
        self._digest = blake3()
        self._file: NewFile | None = None
        self._loading: Loading | None = None

    def take(self, piece: memoryview, offset: int) -> None:
        """The next piece, or the first one again, followed by the rest. In a thread. Raises OSError."""
        if offset == 0:
            self.discard()
            self._digest.reset()
            if self._bucket is None:
                self._file = self._disk.new_file(self._step, self.part.bucket, self.part.size_bytes)
            else:
                self._loading = Loading(self._bucket, named(self._step, self.part))
        self._digest.update(piece)
        if self._loading is not None:
            self._loading.take(piece)
        if self._file is not None:
            self._file.write(piece)

    def finish(self) -> str:
        """As `Wanted.finish`. Raises OSError if it cannot be kept, and ValueError if it is of another model than the bucket's."""
        if self._digest.digest() != self.part.digest:
            return "its file is damaged (its BLAKE3 differs)"
        if self._loading is not None:
            self._loading.finish()
        if self._file is not None:
            self._file.finish()
        self._done(self.part)
        return ""

    def discard(self) -> None:
        """Removes the file on the disk, unless it is finished."""
        if self._file is not None:
            self._file.discard()
            self._file = None
