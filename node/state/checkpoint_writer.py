"""Writes a node's part of each checkpoint in the background, while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from dtfm.node.data.dataset import Data
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.model import Model
from dtfm.node.model.workload import run_dtype
from dtfm.node.state.checkpoint import write_bucket, write_model_files
from dtfm.node.state.state_files import StateFiles
from dtfm.node.training.placement import Group
from dtfm.protos.control_pb2 import BucketWritten, NodeMessage
from dtfm.protos.plan_pb2 import Run

log = logging.getLogger(__name__)


def part_of(node: str, buckets: Mapping[int, Bucket], groups: Mapping[int, Group]) -> list[Bucket]:
    """Those that ``node`` writes into a checkpoint: each bucket is written by one of the nodes that count it."""
    writers = {index: groups[index].counted_by[index % len(groups[index].counted_by)] for index in buckets}
    return [bucket for index, bucket in buckets.items() if writers[index] == node]


class CheckpointWriter:
    """One thread; what it has to say goes to ``report``, in order."""

    def __init__(self, report: Callable[[NodeMessage], None]) -> None:
        self._report = report
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._files = StateFiles(())
        self._written: Future[None] | None = None

    def write(self, run: Run, model: Model, data: Data, step: int, buckets: Collection[Bucket]) -> None:
        """Writes ``buckets`` as they are now; or, while the checkpoint before is still being written, says that, lest files pile
        up."""
        if self._written is not None and not self._written.done():
            for bucket in buckets:
                problem = "the one before is still being written; raise checkpoint.every"
                self._say(BucketWritten(step=step, bucket=bucket.spec.index, problem=problem))
            return
        self._files = StateFiles(buckets)
        self._written = self._thread.submit(self._write, run, model, data, step, self._files)

    def state_changes(self) -> None:
        """To be called before it does."""
        self._files.finish()

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.shutdown()

    def _write(self, run: Run, model: Model, data: Data, step: int, files: StateFiles) -> None:
        folder = f"{run.checkpoint.uri.rstrip('/')}/step-{step:08d}"
        while (file := files.take()) is not None:
            bucket, content = file
            written = BucketWritten(step=step, bucket=bucket)
            try:
                if isinstance(content, Exception):
                    raise content
                written.file, written.size_bytes, written.digest = write_bucket(folder, bucket, content)
                if bucket == 0:
                    write_model_files(folder, model, data, run_dtype(run))
            except Exception as error:
                log.exception("bucket %d could not be written to %s", bucket, folder)
                written.problem = f"{type(error).__name__}: {error}"[:1000]
            self._say(written)

    def _say(self, written: BucketWritten) -> None:
        self._report(NodeMessage(bucket_written=written))
