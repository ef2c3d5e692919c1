"""Frames from peers become tensors: validated, assembled, and queued for the threads that wait for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch

from dtfm.kernels.codec import DTYPES, Codec, decode
from dtfm.kernels.memory import MEMORY
from dtfm.node.host.trace import Activity, note_span
from dtfm.node.host.work import WORK
from dtfm.node.transport.frame_validation import Expectations, validate
from dtfm.protos.control_pb2 import StepReady
from dtfm.protos.frame import CHUNK_BYTES, Assembly, FrameError, FrameProblem, Header, Kind, parse

#: Names a tensor: source, kind, step, index, part.
_Key = tuple[str, Kind, int, int, int]

_BETWEEN_REPLICAS = frozenset({Kind.REDUCE, Kind.GATHER, Kind.ORTHOGONAL})
"""Kinds that replicas exchange; they have streams of their own (sender.py)."""

READ_AHEAD_BYTES = 32 << 20
"""Most bytes that a connection buffers while nobody reads it. How fast these are read says nothing about the link."""

#: A topic of the pipeline's tensors: the kind of work, the step, and of outer steps that are tried, the place.
Topic = tuple[Literal["train", "evaluate"], int] | tuple[Literal["look"], int, int]

TopicT = TypeVar("TopicT", bound=Hashable)
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A whole tensor, still encoded (uint8, ``header.total`` bytes), from the peer ``source``."""

    source: str
    header: Header
    encoded: memoryview

    def decoded(self, device: torch.device) -> torch.Tensor:
        """The tensor, flat, on the ``device``."""
        header = self.header
        return decode(Codec(header.codec), self.encoded, header.elements, DTYPES[header.dtype], device)


class Closed(Exception):
    """The queue was closed before or while a thread waited on it; the message says why."""


class TopicQueue(Generic[TopicT, Item]):
    """A queue per topic, between threads. Closing it wakes every waiter, so that none waits in vain.

    The queue is unbounded: its items must be bounded elsewhere (frames are, by frame_validation.py).
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queues: dict[TopicT, deque[Item]] = {}
        self._closed: str | None = None

    def put(self, topic: TopicT, item: Item) -> None:
        with self._condition:
            self._queues.setdefault(topic, deque()).append(item)
            self._condition.notify_all()

    def get(self, topic: TopicT) -> Item:
        """The next item of ``topic``; waits for it. Raises Closed."""
        with self._condition:
            while True:
                if self._closed is not None:
                    raise Closed(self._closed)
                if queue := self._queues.get(topic):
                    return queue.popleft()
                with WORK.waiting():
                    self._condition.wait()

    def get_nowait(self, topic: TopicT) -> Item | None:
        """The next item of ``topic``, or None. Raises Closed."""
        with self._condition:
            if self._closed is not None:
                raise Closed(self._closed)
            queue = self._queues.get(topic)
            return queue.popleft() if queue else None

    def forget(self, topic: TopicT) -> None:
        """Drops the topic's queue."""
        with self._condition:
            self._queues.pop(topic, None)

    def close(self, reason: str) -> None:
        with self._condition:
            self._closed = self._closed or reason
            self._condition.notify_all()


class _Puts(Protocol):
    def put(self, topic: int, item: Arrival, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Inbox:
    """The queues of one generation."""

    pipeline: TopicQueue[Topic, Arrival]
    of_replicas: Callable[[int], _Puts]
    """By step, the queue of the tensors that replicas exchange."""

    def deliver(self, arrival: Arrival) -> None:
        """Puts a tensor where its kind and its step belong."""
        header = arrival.header
        match header.kind:
            case Kind.ACTIVATION | Kind.GRADIENT:
                self.pipeline.put(("train", header.step), arrival)
            case Kind.EVALUATION:
                self.pipeline.put(("evaluate", header.step), arrival)
            case Kind.LOOK:
                self.pipeline.put(("look", header.step, header.part), arrival)
            case Kind.REDUCE | Kind.GATHER | Kind.ORTHOGONAL:
                self.of_replicas(header.step).put(header.step, arrival)


class Receiver:
    """Takes the frames of one generation and passes each whole tensor to ``deliver`` (see Inbox), once.

    Holds at most what peers may send within two steps. If readers await `readable`, it holds at most ``room`` bytes of replicas'
    tensors per source, plus one tensor.
    """

    def __init__(
        self, expect: Expectations, applied: int, deliver: Callable[[Arrival], None], room: int | None = None
    ) -> None:
        self._expect = expect
        self._applied = applied
        self._deliver = deliver
        self._lock = threading.Lock()
        self._partial: dict[_Key, tuple[Assembly, float]] = {}
        self._done: set[_Key] = set()
        self._paces: dict[str, StepReady.Arrived] = {}
        self._room = room
        self._held: Counter[tuple[str, int]] = Counter()  # bytes of the replicas' tensors, by source and step
        self._waiting: list[asyncio.Future[None]] = []
        self._unpaced: dict[str, int] = {}
        self._closed = False

    def advance(self, applied: int) -> None:
        """``applied`` is applied: frames of it and of earlier steps are stale from now on."""
        with self._lock:
            self._applied = applied
            self._partial = {k: v for k, v in self._partial.items() if k[2] >= applied}
            self._done = {k for k in self._done if k[2] >= applied}
            self._held = Counter({k: v for k, v in self._held.items() if k[1] > applied})
            self._wake()

    def let_go(self, arrival: Arrival) -> None:
        """A tensor that replicas exchange is used up. From any thread."""
        with self._lock:
            key = arrival.source, arrival.header.step
            if key in self._held:
                self._held[key] -= arrival.header.total
            self._wake()

    def close(self) -> None:
        """Ends the waits in `readable` and delivers nothing more: the objects of ``deliver`` can be freed, although peers
        may still send. From any thread."""
        with self._lock:
            self._closed, self._deliver = True, lambda _: None
            self._wake()

    async def readable(self, source: str, kind: Kind) -> None:
        """Waits, after a frame of ``kind`` from ``source``, until the same stream may be read further.

        It may not while the replicas' tensors held from there exceed their room. Other kinds never wait:
        without them nothing here would be used up.
        """
        while kind in _BETWEEN_REPLICAS:
            with self._lock:
                held = sum(size for (of, _), size in self._held.items() if of == source)
                if self._room is None or held <= self._room or self._closed:
                    return
                self._unpaced[source] = READ_AHEAD_BYTES
                waiting = asyncio.get_running_loop().create_future()
                self._waiting.append(waiting)
            await waiting

    def take_paces(self) -> list[StepReady.Arrived]:
        """How fast each source's tensors of more than one frame came since the last call."""
        with self._lock:
            paces, self._paces = self._paces, {}
            return [pace for _, pace in sorted(paces.items())]

    def paces_so_far(self) -> list[StepReady.Arrived]:
        """The speed of each source's tensors since the last call of `take_paces`, including tensors that are still coming. From
        any thread."""
        with self._lock:
            now = time.perf_counter()
            paces: dict[str, StepReady.Arrived] = {}
            for source, pace in self._paces.items():
                paces[source] = StepReady.Arrived(source=source, bytes=pace.bytes, seconds=pace.seconds)
            for (source, *_), (assembly, began) in self._partial.items():
                if self._unpaced.get(source, 0) <= 0:  # else it is this node that does not read
                    pace = paces.setdefault(source, StepReady.Arrived(source=source))
                    pace.bytes += max(0, assembly.received - CHUNK_BYTES)
                    pace.seconds += now - began
        return [pace for _, pace in sorted(paces.items())]

    def take(self, source: str, frame: bytes) -> Kind:
        """Takes one frame from ``source`` and returns its kind. Raises FrameError if it is refused; a stale frame is no fault of
        the sender."""
        header, payload = parse(frame)
        # Without the codec: a tensor is the same however it is encoded.
        key = (source, header.kind, header.step, header.index, header.part)
        with self._lock:
            validate(self._expect, self._applied, source, header)
            WORK.came()
            if key in self._done:
                raise FrameError(FrameProblem.DUPLICATE, f"{header.kind.name} {header.index} part {header.part}")
            assembly, began = self._partial.get(key) or (
                Assembly(header, MEMORY.take(header.total).data),
                time.perf_counter(),
            )
            if not assembly.take(header, payload):
                self._partial[key] = assembly, began
                return header.kind
            self._partial.pop(key, None)
            self._done.add(key)
            if header.kind in _BETWEEN_REPLICAS:
                self._held[source, header.step] += header.total
            if (unpaced := self._unpaced.get(source, 0)) > 0:
                self._unpaced[source] = unpaced - header.total
            elif (after_first := header.total - CHUNK_BYTES) > 0:
                pace = self._paces.setdefault(source, StepReady.Arrived(source=source))
                pace.bytes += after_first
                pace.seconds += time.perf_counter() - began
        note_span(Activity.RECEIVE, header.step, header.index, f"from {source}", began)
        self._deliver(Arrival(source, assembly.header, assembly.encoded))
        return header.kind

    def _wake(self) -> None:
        for waiting in self._waiting:
            waiting.get_loop().call_soon_threadsafe(_wake, waiting)
        self._waiting.clear()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
