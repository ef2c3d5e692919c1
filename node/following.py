"""Copies of buckets that this node will need, made and kept up while others train on them.

A bucket's state comes once; then each step's summed gradients, which are a third of it, and the optimizer's update is done
here too: it gives the same bits everywhere (optimizer.py). So a node enters a plan, or takes over, without a pause for its
state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
import torch

from dtfm.node.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.holding import NORM
from dtfm.node.optimizer import adamw, decayed_ranges
from dtfm.protos.connection import Metadata, open_channel
from dtfm.protos.control_pb2 import Peer, Prefetch
from dtfm.protos.frame import FrameError, FrameProblem, Header, Kind, parse
from dtfm.protos.peer_pb2 import FollowRequest
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.streams import follow_call

log = logging.getLogger(__name__)


#: What a step's number, or else a problem, is told to.
Tell = Callable[[int, str], None]


@dataclass(slots=True)
class _Copy:
    """``at``: the step that the bucket is as of; None while it is not whole. ``newest``: the step that its donor is at.
    ``donors`` are those not tried yet, and the one in use. ``received``: what has come of the state or update in hand."""

    bucket: Bucket
    donors: list[Peer]
    at: int | None = None
    newest: int = 0
    received: bytearray = field(default_factory=bytearray)


class Following:
    """Follows buckets at their donors, all donors at once, until closed. Made and used on one event loop.

    ``tell(step, problem)`` is called whenever all buckets are as of one and the same ``step``, at most one behind their donors;
    and, once, with 0 and a sentence when a bucket cannot be had from anybody.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        dtype: torch.dtype,
        donors: Mapping[BucketSpec, Sequence[Peer]],
        metadata: Metadata,
        tell: Tell,
    ) -> None:
        self._run = run
        self._metadata = metadata
        self._tell = tell
        self._told = -1  # the step last told of
        self._copies = {spec.index: _Copy(Bucket(spec, device, dtype), list(peers)) for spec, peers in donors.items()}
        self._problem = ""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ask(self._copies)

    @property
    def sound(self) -> bool:
        """Whether every bucket has come, or is coming."""
        return all(copy.donors for copy in self._copies.values())

    @property
    def buckets(self) -> frozenset[int]:
        return frozenset(self._copies)

    def tell_instead(self, tell: Tell) -> None:
        """``tell`` in the place of the one before, as if nothing had been told yet."""
        self._tell, self._told = tell, -1
        self._tell_if_near()

    async def at(self, step: int, patience: float) -> dict[int, Bucket]:
        """The buckets that are as of after ``step``; waits up to ``patience`` seconds for updates on their way."""

        def settled() -> bool:
            return all(copy.at is None or copy.at >= step for copy in self._copies.values())

        async with self._changed:
            try:
                async with asyncio.timeout(patience):
                    await self._changed.wait_for(settled)
            except TimeoutError:
                log.warning("what was copied in advance is not all as of step %d", step)
        return {index: copy.bucket for index, copy in self._copies.items() if copy.at == step}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ask(self, indices: Iterable[int]) -> None:
        """Each bucket's first donor is asked for it; who gives least so far, where there is a choice."""
        load: dict[str, int] = {}
        shares: dict[str, tuple[Peer, list[int]]] = {}
        for index in indices:
            copy = self._copies[index]
            if copy.donors:
                donor = min(copy.donors, key=lambda peer: load.get(peer.node, 0))
                load[donor.node] = load.get(donor.node, 0) + copy.bucket.spec.size
                shares.setdefault(donor.node, (donor, []))[1].append(index)
        for donor, part in shares.values():
            task = asyncio.create_task(self._follow(donor, part))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._tell_if_near()

    async def _follow(self, donor: Peer, indices: Collection[int]) -> None:
        """Until the stream breaks; then the next donors are asked."""
        request = FollowRequest(buckets=indices).SerializeToString()
        try:
            async with open_channel(donor.address, self._run.lease_seconds) as channel:
                async for frame in follow_call(channel)(request, metadata=self._metadata):
                    header, payload = parse(frame)
                    if header.index not in indices:
                        raise FrameError(FrameProblem.UNEXPECTED, f"bucket {header.index} was not asked for")
                    await self._take(self._copies[header.index], header, payload)
            why = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except FrameError as error:
            why = f"it sent a frame that is refused: {error}"
        self._problem = f"{donor.node} at {donor.address}: {why}"
        log.info("cannot follow buckets %s any more at %s", sorted(indices), self._problem)
        async with self._changed:
            for index in indices:
                copy = self._copies[index]
                copy.at = None
                copy.received.clear()
                copy.donors = [peer for peer in copy.donors if peer.node != donor.node]
            self._changed.notify_all()
        self._ask(indices)

    async def _take(self, copy: _Copy, header: Header, payload: memoryview) -> None:
        """One frame: the next piece of the bucket's state, or of the update that must come next. Raises FrameError."""
        bucket = copy.bucket
        if copy.at is None:
            kind, step, total = Kind.STATE, header.step, bucket_bytes(bucket.spec, bucket.parameters.dtype)
        else:
            kind, step, total = Kind.UPDATE, copy.at + 1, NORM.size + bucket.gradients.nbytes
        if (header.kind, header.step, header.total, header.offset) != (kind, step, total, len(copy.received)):
            raise FrameError(FrameProblem.UNEXPECTED, f"{header.kind.name} {header.index} of step {header.step}")
        copy.received += payload
        if len(copy.received) < total:
            return
        await asyncio.to_thread(self._apply if kind is Kind.UPDATE else _load, copy, step)
        async with self._changed:
            copy.at, copy.newest = step, max(copy.newest, header.part)
            copy.received = bytearray()
            self._changed.notify_all()
        self._tell_if_near()

    def _apply(self, copy: _Copy, step: int) -> None:
        bucket = copy.bucket
        (norm,) = NORM.unpack_from(copy.received)
        gradients = torch.frombuffer(copy.received, dtype=torch.uint8, offset=NORM.size)
        bucket.gradients.view(torch.uint8).copy_(gradients)
        decayed = decayed_ranges(bucket.spec.parameters)
        adamw(
            self._run.train, step, norm, bucket.parameters, bucket.gradients, bucket.exp_avg, bucket.exp_avg_sq, decayed
        )

    def _tell_if_near(self) -> None:
        first, *others = self._copies.values()
        step, problem = first.at, ""
        if not self.sound:
            step, problem = 0, self._problem or "some layers have no donor"
        elif step is None or any(c.at != step for c in others) or any(c.newest - step > 1 for c in (first, *others)):
            return
        if step != self._told:
            self._told = step
            self._tell(step, problem)


def donors_of(wanted: Prefetch, buckets: Iterable[BucketSpec], node: str) -> dict[BucketSpec, list[Peer]]:
    """For each of the ``buckets`` that the wanted layers use: who has it, other than ``node``."""
    addresses = {peer.node: peer for peer in wanted.peers}
    layers = range(wanted.first_layer, wanted.past_last_layer)
    donors = {}
    for spec in buckets:
        if any(layer in layers for layer in spec.layers):
            names = dict.fromkeys(
                n
                for layer in spec.layers
                if layer < len(wanted.donors)
                for n in wanted.donors[layer].nodes
                if n != node
            )
            donors[spec] = [addresses[name] for name in names if name in addresses]
    return donors


def _load(copy: _Copy, step: int) -> None:
    copy.bucket.load(copy.received)
