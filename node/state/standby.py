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

from dtfm.node.host.trace import Beside, tell_beside
from dtfm.node.model.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.optimizer import adamw, decayed_ranges
from dtfm.node.state.state_store import NORM
from dtfm.protos.connection import open_channel
from dtfm.protos.control_pb2 import Commit, Peer
from dtfm.protos.credentials import Identity, to_peer
from dtfm.protos.frame import FrameError, FrameProblem, Header, Kind, parse
from dtfm.protos.peer_pb2 import FollowRequest
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.streams import follow_call

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copied:
    """All is as of after ``step`` (0: it is not), and, unless ``voted`` is 0, what it takes to go on to the next one is here, as
    voted for in that generation: gradients, or, where its commit came already, what they make. ``problem``: why it cannot go
    on."""

    step: int
    voted: int = 0
    problem: str = ""


Tell = Callable[[Copied], None]


@dataclass(slots=True)
class _Copy:
    """``at``: the step that the bucket is as of; None while it is not whole. ``newest``: the step that its donor is at.
    ``donors`` are those not tried yet, and the one in use, ``donor``; ``begun``: that one has given the state, and steps follow.
    ``have``: how many bytes have come of the tensor in hand. They are in ``received``; those of the first state in the bucket,
    which is ``empty`` until then. ``voted``: the generation and gradients of the next step, which may yet be called off."""

    bucket: Bucket
    donors: list[Peer]
    at: int | None = None
    newest: int = 0
    donor: str = ""
    begun: bool = False
    empty: bool = True
    have: int = 0
    received: bytearray = field(default_factory=bytearray)
    voted: tuple[int, bytearray] | None = None


class Following:
    """Follows buckets at their donors, all donors at once, until closed. Made and used on one event loop.

    ``tell`` is called whenever all buckets are as of one and the same step, at most one behind their donors, and once more when
    all have the next one's gradients; with a problem when a bucket cannot be had from anybody any more.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        dtype: torch.dtype,
        donors: Mapping[BucketSpec, Sequence[Peer]],
        identity: Identity,
        tell: Tell,
    ) -> None:
        self._run = run
        self._identity = identity
        self._tell = tell
        self._told: Copied | None = None
        tell_beside(Beside.COPIES, sum(bucket_bytes(spec, dtype) for spec in donors))
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
    def size(self) -> int:
        """In buckets."""
        return len(self._copies)

    def serves(self, donors: Mapping[BucketSpec, Sequence[Peer]]) -> bool:
        """Whether it follows just these buckets, each at one of these donors."""
        known = {spec.index: {peer.node for peer in peers} for spec, peers in donors.items()}
        asked = {index: copy.donor for index, copy in self._copies.items()}
        return self.sound and asked.keys() == known.keys() and all(donor in known[i] for i, donor in asked.items())

    def tell_instead(self, tell: Tell) -> None:
        """``tell`` in the place of the one before, as if nothing had been told yet."""
        self._tell, self._told = tell, None
        self._tell_if_near()

    async def at(self, commit: Commit, patience: float) -> dict[int, Bucket]:
        """The buckets that are as of after the step of ``commit``, the last one; waits up to ``patience`` seconds for what is on
        its way. Where the donor was lost between the commit and applying it, the step is applied here all the same."""

        def settled() -> bool:
            return all(not c.begun or (c.at is not None and c.at >= commit.step) for c in self._copies.values())

        async with self._changed:
            try:
                async with asyncio.timeout(patience):
                    await self._changed.wait_for(settled)
            except TimeoutError:
                log.warning("what was copied in advance is not all as of step %d", commit.step)
        for copy in self._copies.values():
            voted = copy.voted is not None and copy.voted[0] == commit.generation
            if voted and copy.at == commit.step - 1:
                await asyncio.to_thread(self._apply, copy, commit.step, commit.gradient_norm)
        return {index: copy.bucket for index, copy in self._copies.items() if copy.at == commit.step}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        tell_beside(Beside.COPIES, 0)

    def _weigh(self) -> None:
        size = 0
        for copy in self._copies.values():
            size += bucket_bytes(copy.bucket.spec, copy.bucket.parameters.dtype)
            size += len(copy.received) + (len(copy.voted[1]) if copy.voted is not None else 0)
        tell_beside(Beside.COPIES, size)

    def _ask(self, indices: Iterable[int]) -> None:
        """Each bucket's first donor is asked for it; who gives least so far, where there is a choice."""
        load: dict[str, int] = {}
        shares: dict[str, tuple[Peer, list[int]]] = {}
        for index in indices:
            copy = self._copies[index]
            if copy.donors:
                donor = min(copy.donors, key=lambda peer: load.get(peer.node, 0))
                copy.donor = donor.node
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
            way = to_peer(self._identity, donor.node)
            async with open_channel(donor.address, way, self._run.lease_seconds) as channel:
                async for frame in follow_call(channel)(request):
                    header, payload = parse(frame)
                    if header.index not in indices:
                        raise FrameError(FrameProblem.UNEXPECTED, f"bucket {header.index} was not asked for")
                    await self._take(self._copies[header.index], header, payload)
            why = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except FrameError as error:
            why = f"it sent a frame that is refused: {error}"
        except Exception as error:  # out of memory, say: whoever waits for this must hear of it
            log.exception("copying from %s failed", donor.node)
            why = f"{type(error).__name__}: {error}"
        self._problem = f"{donor.node} at {donor.address}: {why}"
        log.info("cannot follow buckets %s any more at %s", sorted(indices), self._problem)
        async with self._changed:
            for index in indices:
                copy = self._copies[index]
                copy.begun = False  # what it has stays good for as long as no further step is applied
                copy.have = 0
                copy.received.clear()
                copy.donors = [peer for peer in copy.donors if peer.node != donor.node]
            self._changed.notify_all()
        self._ask(indices)

    async def _take(self, copy: _Copy, header: Header, payload: memoryview) -> None:
        """One frame: the next piece of the bucket's state, or of a step that may follow. Raises FrameError."""
        totals = {Kind.STATE: bucket_bytes(copy.bucket.spec, copy.bucket.parameters.dtype)}
        step = header.step
        if copy.begun and copy.at is not None:
            totals, step = {Kind.UPDATE: copy.bucket.parameters.nbytes}, copy.at + 1
            if copy.voted is not None:
                totals[Kind.COMMITTED] = NORM.size
        wanted = (step, totals.get(header.kind), copy.have)
        if (header.step, header.total, header.offset) != wanted:
            raise FrameError(FrameProblem.UNEXPECTED, f"{header.kind.name} {header.index} of step {header.step}")
        if copy.empty:
            copy.bucket.load(payload, header.offset)
        else:
            copy.received += payload
            self._weigh()
        copy.have += len(payload)
        if copy.have < header.total:
            return
        copy.have, whole, copy.received = 0, copy.received, bytearray()
        match header.kind:
            case Kind.STATE:
                copy.at = None
                await asyncio.to_thread(copy.bucket.load, whole)
                copy.at, copy.begun, copy.voted, copy.empty = step, True, None, False
            case Kind.UPDATE:
                copy.voted = header.generation, whole
            case Kind.COMMITTED:
                (norm,) = NORM.unpack(whole)
                await asyncio.to_thread(self._apply, copy, step, norm)
        copy.newest = header.part
        async with self._changed:
            self._changed.notify_all()
        self._tell_if_near()

    def _apply(self, copy: _Copy, step: int, gradient_norm: float) -> None:
        assert copy.voted is not None
        b, (_, received) = copy.bucket, copy.voted
        copy.at, copy.voted = None, None  # until all of it has changed
        if received:
            gradients = torch.frombuffer(received, dtype=b.parameters.dtype).to(b.parameters.device)
            ranges = decayed_ranges(b.spec.parameters)
            adamw(self._run.train, step, gradient_norm, b.parameters, gradients, b.exp_avg, b.exp_avg_sq, ranges)
        copy.at = step

    def _tell_if_near(self) -> None:
        problem = "" if self.sound else self._problem or "some layers have no donor"
        copies = self._copies.values()
        step, voted = self._has()
        if not problem and (step is None or any(copy.newest - step > 1 for copy in copies)):
            return
        news = Copied(step or 0, voted, problem)
        if news != self._told:
            if self._told is None and not problem:
                log.info("%d buckets are copied, as of step %d, and kept up", self.size, news.step)
            log.debug("copies are as of step %d%s", news.step, " and of the next one's gradients" if news.voted else "")
            self._told = news
            self._tell(news)

    def _has(self) -> tuple[int | None, int]:
        """``step`` and ``voted`` as in Copied."""
        at = [copy.at for copy in self._copies.values() if copy.at is not None]
        if len(at) < len(self._copies):
            return None, 0
        step = min(at)
        generations = {c.voted[0] if c.voted is not None else 0 for c in self._copies.values() if c.at == step}
        voted = generations.pop() if len(generations) == 1 else 0
        behind = max(at) - step
        return (step, voted) if behind == 0 or (behind == 1 and voted) else (None, 0)
