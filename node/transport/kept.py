"""The tensors that nodes hand out for audits: of the step that they have voted on, in the bytes that they sent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
import torch

from dtfm.kernels.codec import DTYPES
from dtfm.kernels.memory import MEMORY
from dtfm.node.network.dialling import Dialler
from dtfm.node.transport.commitments import commitment
from dtfm.node.transport.frame_validation import encoded_with
from dtfm.protos.control_pb2 import Peer
from dtfm.protos.frame import Assembly, FrameError, FrameProblem, Header, Kind, parse
from dtfm.protos.identity.credentials import certified_name
from dtfm.protos.peer_pb2 import KeptRequest
from dtfm.protos.streams import method

#: A sent tensor: its header and its encoded bytes, which do not change.
Tensor = tuple[Header, memoryview]


@dataclass(frozen=True, slots=True)
class Offer:
    """The tensors of ``step``, for the nodes ``around``. ``find`` may be called in any thread. It raises LookupError, and what
    it returns must not change, even after the step."""

    generation: int
    step: int
    around: frozenset[str]
    find: Callable[[KeptRequest], Tensor]


class Kept:
    """Hands them out from this node's vote until the step is committed or aborted. For any thread."""

    def __init__(self) -> None:
        self.offer: Offer | None = None

    def find(self, caller: str, request: KeptRequest) -> Tensor:
        """For the ``caller`` with this name in its certificate. Raises LookupError, which says why not. It may encode, which is
        nothing for an event loop."""
        offer = self.offer
        if offer is None:
            raise LookupError("NOTHING_KEPT: this node has not voted, or the step is over")
        if caller not in map(certified_name, offer.around):
            raise LookupError("NOT_AROUND: the caller is of no stage that this node exchanges tensors with")
        if (request.generation, request.step) != (offer.generation, offer.step):
            raise LookupError(
                f"OTHER_STEP: step {request.step} of generation {request.generation} is asked for; this node has voted on "
                f"step {offer.step} of generation {offer.generation}"
            )
        return offer.find(request)


class Withheld(Exception):
    """``node`` did not hand out what it had voted to have sent. ``unreachable``: it has not refused, and the link may be the
    cause."""

    def __init__(self, node: str, why: str, *, unreachable: bool = False) -> None:
        super().__init__(f"{node}: {why}")
        self.node = node
        self.unreachable = unreachable


_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
"""What the node itself says. Other codes come from connections as well, or pass."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that ``node`` has sent, of ``elements`` of ``dtype``. By ``digest`` is told whether it is the one."""

    node: str
    kind: Kind
    index: int
    part: int
    digest: bytes
    elements: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Witnesses:
    """Asks ``peers`` for tensors that they sent in ``step``. Waits at most ``patience`` seconds for each frame, and ``in_all``
    seconds for each peer. Lives on one event loop; close it."""

    generation: int
    step: int
    peers: Mapping[str, Peer]
    dialler: Dialler
    patience: float
    in_all: float = math.inf
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    _waited: dict[str, float] = field(default_factory=dict)

    async def fetch(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Fetches all together. Raises Withheld, and ConnectionError for a node that is not a peer."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._fetch(each)) for each in wanted]
        except* Exception as problems:
            raise problems.exceptions[0] from None
        return [task.result() for task in tasks]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def _fetch(self, wanted: Wanted) -> Tensor:
        if (peer := self.peers.get(wanted.node)) is None:
            raise ConnectionError(f"{wanted.node} is of no stage that this node exchanges tensors with")
        if peer.node not in self._channels:
            self._channels[peer.node] = self.dialler.open(peer.node, self.dialler.target(peer), self.patience)
        request = KeptRequest(
            generation=self.generation, step=self.step, kind=wanted.kind, index=wanted.index, part=wanted.part
        )
        try:
            header, encoded = await self._assemble(self._channels[peer.node], request, wanted)
        except TimeoutError:
            why = f"it sent nothing for {self.patience:.0f} s, or took more than {self.in_all:.0f} s in all"
            raise Withheld(wanted.node, why, unreachable=True) from None
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
            raise Withheld(wanted.node, why, unreachable=error.code() not in _REFUSALS) from None
        except FrameError as error:
            raise Withheld(wanted.node, f"it sent a frame that is refused: {error}") from None
        if await asyncio.to_thread(commitment, header.codec, encoded) != wanted.digest:
            raise Withheld(
                wanted.node, f"its {wanted.kind.name} {wanted.index} part {wanted.part} is not what it voted"
            )
        return header, encoded

    async def _assemble(self, channel: grpc.aio.Channel, request: KeptRequest, wanted: Wanted) -> Tensor:
        assembly: Assembly | None = None
        loop = asyncio.get_running_loop()
        since, waited = loop.time(), self._waited.get(wanted.node, 0.0)
        last = since + max(self.in_all - waited, 0.0)
        try:
            async with asyncio.timeout_at(min(since + self.patience, last)) as silence:
                async for frame in method(channel, "Kept")(request.SerializeToString()):
                    silence.reschedule(min(loop.time() + self.patience, last))
                    header, payload = parse(frame)
                    if assembly is None:
                        _validate(header, request, wanted)
                        assembly = Assembly(header, MEMORY.take(header.total).data)
                    if assembly.take(header, payload):
                        return assembly.header, assembly.encoded
        finally:
            self._waited[wanted.node] = waited + loop.time() - since
        raise FrameError(FrameProblem.TRUNCATED, "it ended before the tensor did")


def _validate(header: Header, request: KeptRequest, wanted: Wanted) -> None:
    """Raises FrameError unless it begins the tensor that is asked for: before memory is taken for it."""
    asked = (request.generation, request.step, wanted.kind, wanted.index, wanted.part, wanted.elements, wanted.dtype)
    dtype = DTYPES.get(header.dtype)
    if (header.generation, header.step, header.kind, header.index, header.part, header.elements, dtype) != asked:
        raise FrameError(FrameProblem.UNEXPECTED, f"{header.kind.name} {header.index} part {header.part}")
    encoded_with(header, wanted.elements, wanted.dtype)
