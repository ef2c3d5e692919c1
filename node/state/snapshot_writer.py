"""Writes this node's part of a snapshot in the background, while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from blake3 import blake3

from dtfm.node.data.storage import write
from dtfm.node.host.device import free_memory
from dtfm.node.model.bucket import Bucket, bucket_bytes
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.precision import run_dtype
from dtfm.node.state.bucket_files import BucketFiles
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import file_name, step_folder, write_model_files
from dtfm.protos.control_pb2 import CHECKPOINT, DISKS, NodeMessage, Part, SnapshotDestination, SnapshotParts

log = logging.getLogger(__name__)
Result = TypeVar("Result")

FREE_MEMORY_FRACTION = 0.5
"""Copies for a snapshot on disks take at most this fraction of the host's free memory."""

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
        files = BucketFiles(buckets)
        try:
            self._check_room(destination, sum(bucket_bytes(b.spec, b.parameters.dtype) for b in buckets))
            self._under_way[destination] = files
            self._thread.submit(self._write, loaded, step, destination, files)
        except Exception as error:  # training goes on all the same
            if self._under_way.get(destination) is files:
                del self._under_way[destination]
            self.tell(SnapshotParts(step=step, destination=destination, problem=in_one_sentence(error)))

    def before_change(self) -> None:
        """To be called before the state changes."""
        for files in list(self._under_way.values()):
            files.finish()

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
        """Raises OSError if ``size_bytes`` cannot be copied and written now."""
        if CHECKPOINT in self._under_way:
            advice = "; raise checkpoint.every" if destination == CHECKPOINT else ""
            raise OSError(f"the one before is still being written{advice}")
        if destination == DISKS:
            if DISKS in self._under_way:
                raise OSError("the one before is still being written")
            check_memory(size_bytes, FREE_MEMORY_FRACTION)
            self._disk.check_room(size_bytes)

    def _write(self, loaded: LoadedRun, step: int, destination: SnapshotDestination, files: BucketFiles) -> None:
        told = SnapshotParts(step=step, destination=destination)
        folder = step_folder(loaded.run.checkpoint.uri, step)
        try:
            if destination == DISKS:
                self._disk.begin(step)
            while not (self._closed and destination == DISKS) and (file := files.take()) is not None:
                bucket, content = file
                if isinstance(content, Exception):
                    raise content
                if destination == DISKS:
                    self._disk.write(step, bucket, content)
                else:
                    write(folder, file_name(bucket), content)
                    if bucket == 0:
                        write_model_files(folder, loaded.model, loaded.data, run_dtype(loaded.run))
                told.parts.append(Part(bucket=bucket, size_bytes=len(content), digest=blake3(content).digest()))
        except Exception as error:
            log.exception("the snapshot of step %d cannot be written", step)
            told.problem = in_one_sentence(error)
        files.drop()
        del self._under_way[destination]
        self.tell(told)


def check_memory(size_bytes: int, fraction: float) -> None:
    """Raises OSError if that is more than ``fraction`` of the host's free memory."""
    free = free_memory(torch.device("cpu"))
    if size_bytes > fraction * free:
        raise OSError(f"copies of {size_bytes} bytes are too much for {free} bytes of free memory")


def in_one_sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_PROBLEM_CHARACTERS]
