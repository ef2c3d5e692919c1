"""Frames from peers become tensors' bytes: checked, put together, handed on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dtfm.kernels.memory import MEMORY
from dtfm.node.admission import Expectations, admit
from dtfm.node.trace import Activity, tell
from dtfm.protos.assembly import Assembly
from dtfm.protos.frame import CHUNK_BYTES, FrameError, FrameProblem, Header, Kind, parse

#: Which tensor: from whom, kind, step, index, part.
_Key = tuple[str, Kind, int, int, int]


#: (bytes that followed first frames, seconds since those had come)
Pace = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A whole tensor, still encoded (uint8, ``header.total`` bytes), from the peer ``source``."""

    source: str
    header: Header
    encoded: memoryview


class Inbox:
    """Takes the frames of one generation and hands whole tensors to ``deliver``, each once. Holds at most what the plan has
    peers send within two steps."""

    def __init__(self, expect: Expectations, applied: int, deliver: Callable[[Arrival], None]) -> None:
        self._expect = expect
        self._applied = applied
        self._deliver = deliver
        self._lock = threading.Lock()
        self._partial: dict[_Key, tuple[Assembly, float]] = {}
        self._done: set[_Key] = set()
        self._paces: dict[str, Pace] = {}

    def advance(self, applied: int) -> None:
        """``applied`` is applied: what belongs to it, or to earlier steps, is stale from now on."""
        with self._lock:
            self._applied = applied
            self._partial = {k: v for k, v in self._partial.items() if k[2] >= applied}
            self._done = {k for k in self._done if k[2] >= applied}

    def take_paces(self) -> dict[str, Pace]:
        """By source, how quickly its tensors of more than one frame came since this was last asked."""
        with self._lock:
            paces, self._paces = self._paces, {}
            return paces

    def take(self, source: str, frame: bytes) -> None:
        """One frame from ``source``. Raises FrameError for one that is refused; a stale one is no fault of the sender's."""
        header, payload = parse(frame)
        # Not by codec: a tensor is one and the same however it is encoded.
        key = (source, header.kind, header.step, header.index, header.part)
        with self._lock:
            admit(self._expect, self._applied, source, header)
            if key in self._done:
                raise FrameError(FrameProblem.DUPLICATE, f"{header.kind.name} {header.index} part {header.part}")
            assembly, began = self._partial.get(key) or (
                Assembly(header, MEMORY.take(header.total).data),
                time.perf_counter(),
            )
            if not assembly.take(header, payload):
                self._partial[key] = assembly, began
                return
            self._partial.pop(key, None)
            self._done.add(key)
            if (after_first := header.total - CHUNK_BYTES) > 0:
                bytes_, seconds = self._paces.get(source, (0, 0.0))
                self._paces[source] = bytes_ + after_first, seconds + time.perf_counter() - began
        tell(Activity.RECEIVE, header.step, header.index, f"from {source}", began)
        self._deliver(Arrival(source, assembly.header, assembly.encoded))
