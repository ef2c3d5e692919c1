"""Writes this node's part of a snapshot in the background, while training goes on."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from blake3 import blake3

from dtfm.node.data.storage import NewFile
from dtfm.node.model.bucket import Bucket, bucket_bytes
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.precision import run_dtype
from dtfm.node.state.bucket_files import BucketFile, BucketFiles
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import write_model_files
from dtfm.protos.checkpoint_names import NONCE_BYTES, bucket_file, step_folder
from dtfm.protos.control_pb2 import CHECKPOINT, DISKS, NodeMessage, Part, SnapshotDestination, SnapshotParts

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MOST_PROBLEM_CHARACTERS = 1000


class SnapshotWriter:
    """One thread that writes snapshots to the run's URL or to ``disk``. ``report`` takes a message for the coordinator."""

    def __init__(self, disk: Disk, report: Callable[[NodeMessage], None]) -> None:
        self._disk = disk
        self._report = report
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._under_way: dict[SnapshotDestination, BucketFiles] = {}
        self._closed = False

    def write(
        self, loaded: LoadedRun, step: int, destination: SnapshotDestination, buckets: Collection[Bucket]
    ) -> None:
        """Writes ``buckets`` as they are now, in the background, and reports SnapshotParts.

        Refuses, and reports why, if the one before is still being written (a checkpoint waits for a snapshot on disks, but
        not the reverse), or if there is no room.
        """
        if not buckets:
            self.tell(SnapshotParts(step=step, destination=destination))
            return
        files = BucketFiles(buckets, self._disk.scratch)
        try:
            self._check_room(destination, sum(bucket_bytes(b.spec, b.parameters.dtype) for b in buckets))
            self._under_way[destination] = files
            self._thread.submit(self._write, loaded, step, destination, files)
        except Exception as error:  # training goes on all the same
            if self._under_way.get(destination) is files:
                del self._under_way[destination]
            self.tell(SnapshotParts(step=step, destination=destination, problem=in_one_sentence(error)))

    def before_change(self) -> None:
        """To be called before the state changes, by the thread that changes it."""
        for files in list(self._under_way.values()):
            files.keep()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Runs ``work`` in the writer's thread, so that it never meets a file being written."""
        return self._thread.submit(work)

    def tell(self, parts: SnapshotParts) -> None:
        self._report(NodeMessage(snapshot_parts=parts))

    def close(self) -> None:
        """Waits for checkpoints, and for the file being written of a snapshot on disks."""
        self._closed = True
        self._thread.shutdown()

    def _check_room(self, destination: SnapshotDestination, size_bytes: int) -> None:
        """Raises OSError if ``size_bytes`` cannot be written now."""
        if CHECKPOINT in self._under_way:
            advice = "; raise checkpoint.every" if destination == CHECKPOINT else ""
            raise OSError(f"the one before is still being written{advice}")
        if destination == DISKS:
            if DISKS in self._under_way:
                raise OSError("the one before is still being written")
            self._disk.check_room(size_bytes)

    def _write(self, loaded: LoadedRun, step: int, destination: SnapshotDestination, files: BucketFiles) -> None:
        told = SnapshotParts(step=step, destination=destination)
        folder = step_folder(loaded.run.checkpoint.uri, step)
        try:
            if destination == DISKS:
                self._disk.begin(step)
            while not (self._closed and destination == DISKS) and (file := files.take()) is not None:
                if destination == DISKS:
                    part = _written(file, self._disk.new_file(step, file.bucket, file.size_bytes))
                else:
                    nonce = secrets.token_hex(NONCE_BYTES)
                    part = _written(file, NewFile(folder, bucket_file(file.bucket, nonce)))
                    part.nonce = nonce
                    if file.bucket == 0:
                        write_model_files(folder, loaded.model, loaded.data, run_dtype(loaded.run))
                told.parts.append(part)
        except Exception as error:
            log.exception("the snapshot of step %d cannot be written", step)
            told.problem = in_one_sentence(error)
        files.drop()
        del self._under_way[destination]
        self.tell(told)


def _written(file: BucketFile, target: NewFile) -> Part:
    """Writes ``file`` to ``target``."""
    digest = blake3()
    with target:
        for piece in file.pieces:
            digest.update(piece)
            target.write(piece)
        target.finish()
    return Part(bucket=file.bucket, size_bytes=file.size_bytes, digest=digest.digest())


def in_one_sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_PROBLEM_CHARACTERS]
