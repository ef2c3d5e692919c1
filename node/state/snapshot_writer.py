"""Writes this node's part of a snapshot in the background, while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from blake3 import blake3

from dtfm.node.data.storage import NewFile
from dtfm.node.model.bucket import Bucket, bucket_bytes
from dtfm.node.state.bucket_files import BucketFile, BucketFiles
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import in_one_sentence
from dtfm.protos.control_pb2 import NodeMessage, Part, SnapshotParts

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class SnapshotWriter:
    """One thread that writes snapshots to ``disk``. ``report`` takes a message for the coordinator."""

    def __init__(self, disk: Disk, report: Callable[[NodeMessage], None]) -> None:
        self._disk = disk
        self._report = report
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._under_way: BucketFiles | None = None
        self._closed = False

    def write(self, step: int, buckets: Collection[Bucket]) -> None:
        """Writes ``buckets`` as they are now, in the background, and reports SnapshotParts.

        Refuses, and reports why, if the snapshot before is still being written, or if there is no room.
        """
        files = BucketFiles(buckets, self._disk.scratch)
        try:
            if self._under_way is not None:
                raise OSError("the one before is still being written")
            self._disk.check_room(sum(bucket_bytes(b.spec, b.parameters.dtype) for b in buckets))
            self._under_way = files
            self._thread.submit(self._write, step, files)
        except Exception as error:  # training goes on all the same
            if self._under_way is files:
                self._under_way = None
            self.tell(SnapshotParts(step=step, problem=in_one_sentence(error)))

    def before_change(self) -> None:
        """To be called before the state changes, by the thread that changes it."""
        if (files := self._under_way) is not None:
            files.keep()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Runs ``work`` in the writer's thread, so that it never meets a file being written."""
        return self._thread.submit(work)

    def tell(self, parts: SnapshotParts) -> None:
        self._report(NodeMessage(snapshot_parts=parts))

    def close(self) -> None:
        """Waits for the file that is being written."""
        self._closed = True
        self._thread.shutdown()

    def _write(self, step: int, files: BucketFiles) -> None:
        told = SnapshotParts(step=step)
        try:
            self._disk.begin(step)
            while not self._closed and (file := files.take()) is not None:
                told.parts.append(_written(file, self._disk.new_file(step, file.bucket, file.size_bytes)))
        except Exception as error:
            log.exception("the snapshot of step %d cannot be written", step)
            told.problem = in_one_sentence(error)
        files.drop()
        self._under_way = None
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
