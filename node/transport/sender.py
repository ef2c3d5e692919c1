"""Tensors to peers: encoded, queued within bounds, written to one long-lived stream per peer and rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc.aio
import torch

from dtfm.kernels.codec import DTYPE_NUMBERS, Codec, Encoded, encode
from dtfm.node.host.cuda_streams import after
from dtfm.node.host.trace import Activity, span
from dtfm.node.host.work import WORK
from dtfm.node.network.dialling import Dialler, Lost
from dtfm.node.transport.receiver import Closed
from dtfm.node.transport.send_priority import Rank, SendPriority
from dtfm.protos.frame import Header, Kind, frames
from dtfm.protos.identity.credentials import Identity, is_half_over
from dtfm.protos.streams import NODE_METADATA, method

log = logging.getLogger(__name__)

QUEUE_BYTES = 32 << 20
"""Most bytes that may wait for one stream; a thread that sends more waits until the link has taken some (back-pressure)."""

MOST_ANSWER_BYTES = 500
"""Bytes that are read of a peer's reason for ending a stream."""

_RANKS = {
    Kind.ACTIVATION: Rank.PIPELINE,
    Kind.GRADIENT: Rank.PIPELINE,
    Kind.EVALUATION: Rank.PIPELINE,
    Kind.LOOK: Rank.PIPELINE,
    Kind.REDUCE: Rank.REDUCTION,
    Kind.GATHER: Rank.REDUCTION,
    Kind.ORTHOGONAL: Rank.REDUCTION,
}


@dataclass(frozen=True, slots=True)
class What:
    """Which tensor is sent: ``index`` and ``part`` as in frame.Kind, and what it holds before it is encoded."""

    kind: Kind
    generation: int
    step: int
    index: int
    part: int
    elements: int
    dtype: torch.dtype

    def header(self, encoded: Encoded) -> Header:
        """Of its frames."""
        dtype = DTYPE_NUMBERS[self.dtype]
        named = (self.generation, self.step, self.index, self.part, self.elements)
        return Header(self.kind, encoded.codec, dtype, *named, len(encoded.data))


def ready(encoded: Encoded) -> Future[Encoded]:
    """What is encoded already, as `Sender.send` takes it."""
    future = Future[Encoded]()
    future.set_result(encoded)
    return future


#: A tensor's header and its encoded bytes.
_Item = tuple[Header, memoryview]


class _Lane:
    """One stream to one peer. Computing threads call ``reserve``; the rest runs on the event loop."""

    def __init__(self, node: str, rank: Rank, priority: SendPriority) -> None:
        self.name = f"{rank.name.lower()} to {node}"
        self.carried = 0  # the generation of the last tensor written
        self._closed = False
        self.node = node
        self.rank = rank
        self._priority = priority
        self.queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._room = threading.Condition()
        self._waiting_bytes = 0

    def reserve(self, size: int, closed: Callable[[], str | None]) -> None:
        """Waits for room for ``size`` bytes. Raises Closed."""
        with self._room:
            while True:
                if (reason := closed()) is not None:
                    raise Closed(reason)
                if self._waiting_bytes == 0 or self._waiting_bytes + size <= QUEUE_BYTES:
                    self._waiting_bytes += size
                    return
                with WORK.waiting():
                    self._room.wait()

    def release(self, size: int) -> None:
        """Wakes the senders that wait for room."""
        with self._room:
            self._waiting_bytes -= size
            self._room.notify_all()

    def put(self, item: _Item) -> None:
        if self._closed:
            return
        self._priority.occupy(self.node, self.rank)
        self.queue.put_nowait(item)

    def done(self, size: int) -> None:
        """An item from the queue is written, or never will be."""
        self.release(size)
        if self.queue.empty():
            self._priority.vacate(self.node, self.rank)

    def clear(self) -> None:
        while not self.queue.empty():
            self.done(len(self.queue.get_nowait()[1]))

    def close(self) -> None:
        self._closed = True
        self._priority.vacate(self.node, self.rank)


class Sender:
    """The sending side of a node's data plane.

    ``on_failed(generation, error)`` is called on the event loop when a stream that carried tensors of that generation breaks
    (Lost). It is also called when a tensor could not be encoded here, which is no fault of the peer's.
    """

    def __init__(self, node: str, on_failed: Callable[[int, Exception], None]) -> None:
        self.priority = SendPriority()
        self._node = node
        self._on_failed = on_failed
        self._shown: dict[str, Identity] = {}
        self._loop = asyncio.get_running_loop()
        self._encoder = ThreadPoolExecutor(1, "encode")
        self._targets: dict[str, str] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._lanes: dict[tuple[str, Rank], _Lane] = {}
        self._writers: dict[tuple[str, Rank], asyncio.Task[None]] = {}
        self._generation = 0
        self._closed: str | None = None

    async def connect(
        self, generation: int, dialler: Dialler, targets: Mapping[str, str], timeout: float, lease: float
    ) -> None:
        """Opens what ``generation`` needs: a channel and lanes to each node of ``targets`` (see
        `Dialler.target`), and closes all others.

        Returns when all are reachable. A peer that vanishes without a word counts as lost after about ``lease`` seconds. Raises
        Lost for a peer that is not reachable within ``timeout`` seconds.
        """
        self._generation, self._closed = generation, None
        # A channel that breaks connects again as who it was made for, which must still be accepted then.
        renewed = {node for node, shown in self._shown.items() if _is_stale(shown, dialler.identity)}
        for node in [n for n, target in self._targets.items() if n in renewed or targets.get(n) != target]:
            await self._disconnect(node)
        for node, target in targets.items():
            if node not in self._channels:
                self._targets[node] = target
                self._shown[node] = dialler.identity
                self._channels[node] = dialler.open(node, target, lease)
                for rank in sorted(set(_RANKS.values())):
                    lane = self._lanes[node, rank] = _Lane(node, rank, self.priority)
                    self._writers[node, rank] = asyncio.create_task(self._write(node, lane))
        ready = {node: asyncio.create_task(channel.channel_ready()) for node, channel in self._channels.items()}
        pending = set(ready.values())
        try:
            if ready:
                _, pending = await asyncio.wait(pending, timeout=timeout)
        finally:  # else abandoned tasks would complain of channels that close
            for task in ready.values():
                task.cancel()
        for node, task in ready.items():
            if task in pending:
                raise Lost(
                    node,
                    f"it cannot be reached at {targets[node]} within {timeout:.0f} s: is that port open in its firewall, "
                    "and does its --advertise name an address that others can reach?",
                )

    def interrupt(self, reason: str) -> None:
        """Raises Closed in threads that wait for room or send before the next `connect`."""
        self._closed = reason
        for lane in self._lanes.values():
            lane.release(0)

    def encode(self, what: What, tensor: torch.Tensor, codec: Codec) -> Future[Encoded]:
        """Encodes ``tensor`` (any shape), which must not change until that is done. From any thread; does not wait."""
        computed = after(tensor.device)

        def encode_it() -> Encoded:
            try:
                with computed(), span(Activity.ENCODE, what.step, what.index):
                    return encode(codec, tensor)
            except Exception as error:  # nobody may be waiting for it but the peer
                self._loop.call_soon_threadsafe(self._on_failed, what.generation, error)
                raise

        return self._encoder.submit(encode_it)

    def send(self, destination: str, what: What, encoded: Future[Encoded]) -> None:
        """Queues the tensor that `encode` or `ready` returns. From any thread. Waits while the lane is full. Raises Closed."""
        lane = self._lanes[destination, _RANKS[what.kind]]
        size = what.elements * what.dtype.itemsize
        lane.reserve(size, lambda: self._closed)

        def queue(done: Future[Encoded]) -> None:
            if done.cancelled() or done.exception() is not None:
                lane.release(size)
                return
            tensor = done.result()
            lane.release(size - len(tensor.data))  # the lane's room is of bytes that wait for the link
            self._loop.call_soon_threadsafe(lane.put, (what.header(tensor), tensor.data))

        encoded.add_done_callback(queue)

    async def close(self) -> None:
        self.interrupt("the node is stopping")
        for node in list(self._channels):
            await self._disconnect(node)
        self._encoder.shutdown()

    async def _disconnect(self, node: str) -> None:
        for key in [k for k in self._writers if k[0] == node]:
            writer = self._writers.pop(key)
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
            self._lanes.pop(key).close()
        self._targets.pop(node)
        self._shown.pop(node)
        await self._channels.pop(node).close()

    async def _write(self, node: str, lane: _Lane) -> None:
        """Keeps one stream open to ``node`` and writes the queued tensors; opens a new stream when one has broken."""
        while True:
            first = await lane.queue.get()
            call = method(self._channels[node], "Tensors")(metadata=((NODE_METADATA, self._node),))
            # In a task of our own: an iterator given to grpc outlives its call and would swallow the next item.
            pump = asyncio.create_task(self._pump(call, lane, first))
            problem: Exception | None = None
            try:
                answer: bytes = await call
                why = answer[:MOST_ANSWER_BYTES].decode(errors="replace") or "it ended the stream"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            except asyncio.CancelledError:
                itself, failed = asyncio.current_task(), pump.exception() if pump.done() else None
                if not isinstance(failed, Exception) or itself is None or itself.cancelling():
                    raise
                why, problem = repr(failed), failed
            finally:
                call.cancel()
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)
            log.debug("the stream %s broke: %s", lane.name, why)
            if lane.carried == self._generation:  # else this generation has lost nothing, and its queue is good
                lane.clear()
                self._on_failed(lane.carried, problem or Lost(node, why))

    async def _pump(self, call: Any, lane: _Lane, item: _Item) -> None:
        try:
            while True:
                header, encoded = item
                try:
                    if header.generation == self._generation:
                        lane.carried = header.generation
                        with span(Activity.SEND, header.step, header.index, lane.name):
                            for frame in frames(header, encoded):
                                began = time.monotonic()
                                await call.write(frame)
                                await self.priority.give_way(lane.rank, time.monotonic() - began, lane.node)
                finally:
                    lane.done(len(encoded))
                item = await lane.queue.get()
        finally:
            call.cancel()


def _is_stale(shown: Identity, now: Identity) -> bool:
    """Whether a channel that shows the one identity should show the other."""
    if shown.authority != now.authority:  # the coordinator was started again
        return True
    return shown.certificate != now.certificate and is_half_over(shown.certificate, datetime.now(UTC))
