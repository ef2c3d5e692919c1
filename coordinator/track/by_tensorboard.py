"""Curves for TensorBoard: a file of events in a folder of the run. A later process continues the file."""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from dtfm.coordinator.track.tracker import TrackedRun, TrackerError
from dtfm.coordinator.view.curves import Reading
from dtfm.file_lock import try_lock

FILE = "events.out.tfevents.dtfm"
"""TensorBoard knows its files by the middle of their names."""
_HEADER, _CHECKSUM = struct.Struct("<QI"), 4
MOST_BYTES = 1 << 20
"""The most bytes of an event; ours have some hundred."""


def check(place: str) -> None:
    """Raises TrackerError unless files can be written there."""
    with _explained(place):
        Path(place).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()


class Writer:
    """Writes each reading as one event of the file. The event's ``node_name`` is the number of the log's event: TensorBoard
    does not read that field, and the next process reads it. This process must be the only one that writes the run there."""

    def __init__(self, place: str, run: TrackedRun) -> None:
        self._folder = folder = Path(place) / run.label
        with ExitStack() as stack, _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if (lock := try_lock(folder / ".lock")) is None:
                raise TrackerError(f"another process writes into {folder}; stop that one, or give another folder")
            stack.callback(os.close, lock)
            self._file: Any = (folder / FILE).open("r+b" if (folder / FILE).exists() else "x+b")
            stack.callback(self._file.close)
            self._records = RecordWriter(self._file)
            self.has = self._go_on()
            self._open = stack.pop_all()

    def write(self, sequence: int, figures: Reading) -> None:
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=each) for tag, each in figures.values.items()]
        if values:
            values[0].node_name = str(sequence)
        self._add(wall_time=figures.time, step=figures.step, summary=summary_pb2.Summary(value=values))
        self.has = sequence

    def back_to(self, time: float, step: int) -> None:
        """Makes TensorBoard forget later steps."""
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(wall_time=time, step=step + 1, session_log=start)

    def flush(self) -> None:
        with _explained(self._folder):
            self._file.flush()

    def close(self) -> None:
        with _explained(self._folder):
            self._open.close()

    def _add(self, **fields: Any) -> None:
        with _explained(self._folder):
            self._records.write(event_pb2.Event(**fields).SerializeToString())

    def _go_on(self) -> int:
        """Cuts off an incomplete last event, and returns the number in the last complete one."""
        size, end, starts = self._file.seek(0, os.SEEK_END), 0, list[int]()
        while end + _HEADER.size <= size:
            self._file.seek(end)
            length, _ = _HEADER.unpack(self._file.read(_HEADER.size))
            if length > MOST_BYTES or (after := end + _HEADER.size + length + _CHECKSUM) > size:
                break
            starts.append(end)
            end = after
        self._file.seek(end)
        self._file.truncate()
        if not starts:
            self._add(wall_time=time.time(), file_version="brain.Event:2")
        for start in reversed(starts):
            if number := self._number_at(start):
                return number
        return 0

    def _number_at(self, start: int) -> int:
        self._file.seek(start)
        length, _ = _HEADER.unpack(self._file.read(_HEADER.size))
        event = event_pb2.Event.FromString(self._file.read(length))
        self._file.seek(0, os.SEEK_END)
        return next((int(value.node_name) for value in event.summary.value if value.node_name.isdecimal()), 0)


@contextmanager
def _explained(place: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise TrackerError(
            f"{place} cannot be written ({why}); make room, let this user write there, or name another folder"
        ) from None
