"""Reads the wandb library's file of a run: records of its own protocol in the frames of LevelDB's log."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

_HEAD, _BLOCK = 7, 32768
_FRAME = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records_in(file: Path) -> Iterator[Any]:
    """The records of the file, up to the first incomplete one."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), _HEAD, b""
    while at + _FRAME.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _FRAME.size:  # the rest of a block is empty
            at += left
            continue
        _, length, kind = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or at + length > len(data):
            return
        parts = (b"" if kind in (_FULL, _FIRST) else parts) + data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            try:
                yield wandb_internal_pb2.Record.FromString(parts)
            except DecodeError:
                return


def last_point(file: Path) -> int:
    """The number of the file's last point; 0: it has none."""
    return max((record.history.step.num for record in records_in(file) if record.HasField("history")), default=0)
