"""Writes this node's part of a snapshot in the background, while training goes on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

from blake3 import blake3

from dtfm.node.data.problems import sentence_of
from dtfm.node.model.bucket import Bucket, bucket_bytes
from dtfm.node.state.disk import Disk
from dtfm.node.state.images import Images, Reading
from dtfm.node.state.snapshot_files import file_header
from dtfm.protos.control_pb2 import Moved, NodeMessage, Part

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class SnapshotWriter:
    """One thread that writes snapshots to ``disk``. ``report`` takes a message for the coordinator."""

    def __init__(self, disk: Disk, report: Callable[[NodeMessage], None]) -> None:
        self._disk = disk
        self._report = report
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._under_way = False
        self._closed = False

    def write(self, step: int, buckets: Collection[Bucket], images: Images) -> None:
        """Writes the present state of ``buckets`` in the background, and reports Moved. For the thread that changes them.

        Refuses, and reports why, if the snapshot before is still being written, or if there is no room.
        """
        try:
            if self._under_way:
                raise OSError("the one before is still being written")
            self._disk.check_room(sum(bucket_bytes(b.spec, b.parameters.dtype) for b in buckets))
            files = deque((file_header(b.spec, b.parameters.dtype), images.read(b)) for b in buckets)
            self._under_way = True
            self._thread.submit(self._write, step, files)
        except Exception as error:  # training goes on all the same
            self.tell(Moved(step=step, problem=sentence_of(error)))

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Runs ``work`` in the writer's thread, so that it never meets a file being written."""
        return self._thread.submit(work)

    def tell(self, moved: Moved) -> None:
        self._report(NodeMessage(moved=moved))

    def close(self) -> None:
        """Waits for the file that is being written."""
        self._closed = True
        self._thread.shutdown()

    def _write(self, step: int, files: deque[tuple[bytes, Reading]]) -> None:
        told = Moved(step=step)
        try:
            while files and not self._closed:
                told.parts.append(self._write_file(step, *files.popleft()))
        except Exception as error:
            log.exception("the snapshot of step %d cannot be written", step)
            told.problem = sentence_of(error)
        files.clear()  # frees the copies that are kept for it
        self._under_way = False
        self.tell(told)

    def _write_file(self, step: int, header: bytes, state: Reading) -> Part:
        size, digest = len(header) + state.size_bytes, blake3()
        pieces: Iterator[bytes | memoryview] = chain((header,), state)
        with self._disk.new_file(step, state.bucket, size) as target:
            for piece in pieces:
                digest.update(piece)
                target.write(piece)
            target.finish()
        return Part(bucket=state.bucket, size_bytes=size, digest=digest.digest())
