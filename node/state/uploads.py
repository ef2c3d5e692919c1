"""Sends files of a snapshot from this node's disk to the run's place for checkpoints, in the background."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from blake3 import blake3

from dtfm.node.data.allowed import check_checkpoint
from dtfm.node.data.problems import sentence_of
from dtfm.node.data.shared.storage import NewFile, check_place
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.precision import run_dtype
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import file_header, write_model_files
from dtfm.protos.checkpoint_names import NONCE_BYTES, bucket_file
from dtfm.protos.control_pb2 import Move, Moved, NodeMessage, Part

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""Bytes that are sent at a time. An upload that spares the line pauses after each."""


class Abandoned(Exception):
    """The coordinator no longer wants the file."""


class Uploads:
    """One thread that sends files. ``report`` takes a message for the coordinator."""

    def __init__(self, disk: Disk, report: Callable[[NodeMessage], None]) -> None:
        self._disk = disk
        self._report = report
        self._thread = ThreadPoolExecutor(1, "upload")
        self._step = 0
        self._changed = Event()  # ends a pause of the thread

    def send(self, loaded: LoadedRun, upload: Move) -> None:
        """Sends the files in the background, after files of the same step that are on their way, and reports each."""
        self._turn_to(upload.step)
        self._thread.submit(self._send, loaded, upload)

    def keep(self, steps: Collection[int]) -> None:
        """Stops sending files of other steps."""
        if self._step not in steps:
            self._turn_to(0)

    def close(self) -> None:
        """Ends with the piece that is on its way."""
        self._turn_to(0)
        self._thread.shutdown(cancel_futures=True)

    def _turn_to(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._changed.set()

    def _send(self, loaded: LoadedRun, upload: Move) -> None:
        self._changed.clear()
        try:
            for part in upload.parts:
                self._check_wanted(upload)
                check_checkpoint(upload.folder, loaded.allowed.places)
                if (place := upload.folder.rpartition("/")[0]) != loaded.run.checkpoint.uri.rstrip("/"):
                    check_place(place, loaded.run.id, self._disk.node)  # an operator has named another since
                if part.bucket == 0:
                    write_model_files(upload.folder, loaded.model, loaded.data, run_dtype(loaded.run))
                sent = self._send_file(loaded, upload, part)
                self._tell(Moved(step=upload.step, parts=[sent]))
        except Abandoned:
            log.info("the checkpoint of step %d is no longer wanted", upload.step)
        except Exception as error:
            log.warning("a part of step %d cannot be sent to %s: %s", upload.step, upload.folder, error)
            self._tell(Moved(step=upload.step, problem=sentence_of(error)))

    def _tell(self, moved: Moved) -> None:
        moved.in_checkpoint = True
        self._report(NodeMessage(moved=moved))

    def _send_file(self, loaded: LoadedRun, upload: Move, part: Part) -> Part:
        """Returns the part that has arrived."""
        spec, dtype = loaded.model.buckets[part.bucket], run_dtype(loaded.run)
        header = file_header(spec, dtype)
        sizes = len(header), *(size * dtype.itemsize for size in spec.sizes)
        first = file_header(spec, dtype, weights=True) if upload.weights else header
        whole, sent, found = blake3(), blake3(first), [blake3() for _ in sizes]
        nonce, at, size, begun = secrets.token_hex(NONCE_BYTES), 0, len(first), time.monotonic()
        with NewFile(upload.folder, bucket_file(part.bucket, nonce)) as target:
            target.write(first)
            for piece in self._disk.read(upload.step, part.bucket, at_once=PIECE_BYTES)[1]:
                self._check_wanted(upload)
                whole.update(piece)
                for number, content in enumerate(_split(piece, at, sizes)):
                    found[number].update(content)
                    if number == 1 or (number > 1 and not upload.weights):
                        target.write(content)
                        sent.update(content)
                        size += len(content)
                at += len(piece)
                if upload.bytes_per_second:
                    self._changed.wait(max(0.0, begun + size / upload.bytes_per_second - time.monotonic()))
            if whole.digest() != part.digest or found[0].digest() != blake3(header).digest():
                raise OSError(f"bucket {part.bucket} of step {upload.step} is damaged on this node's disk")
            target.finish()
        moments = b"".join(tensor.digest() for tensor in found[2:]) if upload.weights else b""
        return Part(bucket=part.bucket, size_bytes=size, digest=sent.digest(), nonce=nonce, moments=moments)

    def _check_wanted(self, upload: Move) -> None:
        """Raises Abandoned if the coordinator no longer wants the file."""
        if self._step != upload.step:
            raise Abandoned


def _split(piece: memoryview, at: int, sizes: tuple[int, ...]) -> Iterator[memoryview]:
    """The bytes of a file's ``piece``, which begins at byte ``at``, for each of the file's parts of these ``sizes``."""
    for size in sizes:
        yield piece[max(-at, 0) : max(size - at, 0)]
        at -= size
