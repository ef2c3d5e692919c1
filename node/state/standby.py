"""A standby's copies of buckets, kept up step by step while other nodes train on them.

A bucket's state comes once. After that come each step's summed gradients, a third of its size, and the optimizer's update is
done here too, with the same bits as everywhere (optimizer.py). So a node enters a plan, or takes over from a lost one,
without a pause to fetch state. With rounds, the state that all islands share comes, then the sum of each exchange. These copies
are as of the last exchange, and are for a new island.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc
import grpc.aio
import torch

from dtfm.kernels.codec import Codec
from dtfm.node.data.problems import MOST_CHARACTERS
from dtfm.node.model.bucket import UPDATES_DTYPE, Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.optimizer.optimizer import Terms, inner_step, outer_step, terms_of
from dtfm.node.network.dialling import Dialler
from dtfm.node.state.gathered import Gathered
from dtfm.node.state.state_store import TERMS
from dtfm.node.state.update import unpack
from dtfm.protos.control_pb2 import Commit, Peer, StandbyProgress
from dtfm.protos.frame import FrameError, FrameProblem, Header, Kind, parse
from dtfm.protos.peer_pb2 import StandbyRequest
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.streams import method
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds

log = logging.getLogger(__name__)


#: Called with how far the copies are, without the number of the request.
Tell = Callable[[StandbyProgress], None]


@dataclass(slots=True)
class _Copy:
    """One bucket's copy.

    step: the last step in the copy, None while the copy is not whole.
    newest: the step that its donor is at.
    donors: the donors that are not given up.
    donor: the donor in use; ``started``: whether its state has come, so that steps follow.
    have: the number of bytes received of the present tensor. They are in ``received`` or, while the bucket is ``empty``, in
    ``arriving``, which fills the bucket itself.
    voted: the generation, gradients and Muon's updates of the next step, which may yet be aborted.
    applied: the last step whose update has begun here; ``applying`` is that update.
    """

    bucket: Bucket
    donors: list[Peer]
    arriving: Gathered
    step: int | None = None
    newest: int = 0
    donor: str = ""
    started: bool = False
    empty: bool = True
    have: int = 0
    received: bytearray = field(default_factory=bytearray)
    voted: tuple[int, torch.Tensor, torch.Tensor] | None = None
    applied: int = 0
    applying: asyncio.Future[None] | None = None


class StandbyCopies:
    """Copies buckets from their donors into the host's memory, all donors at once, and keeps them up until closed. Lives on one
    event loop.

    ``tell`` is called whenever all buckets have the same step, at most one behind their donors, and again when all
    have the next step's gradients. It is also called, with a problem, when a bucket's last donor is lost.
    """

    def __init__(
        self,
        run: Run,
        copied: Sequence[tuple[Bucket, Sequence[Peer]]],
        dialler: Dialler,
        tell: Tell,
        counted: tuple[Rounds, int] = (NO_ROUNDS, 0),
    ) -> None:
        """``copied``: the buckets to fill, each with its donors. ``counted``: how to count steps, by the rounds, and the steps
        that were trained before the donors' moments began."""
        self._run = run
        self.counted, (self._rounds, self._trained_before) = counted, counted
        self._dialler = dialler
        self._tell = tell
        self._told: StandbyProgress | None = None
        self._shared = self._rounds.count > 0  # the copies hold the state that islands share
        self._copies = {
            bucket.spec.index: _Copy(bucket, list(donors), Gathered(partial(bucket.load, shared=self._shared)))
            for bucket, donors in copied
        }
        self._problem = ""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ask(self._copies)

    @property
    def is_sound(self) -> bool:
        """Whether every bucket has a donor."""
        return all(copy.donors for copy in self._copies.values())

    def __len__(self) -> int:
        """The number of buckets."""
        return len(self._copies)

    def serves(self, donors: Mapping[BucketSpec, Sequence[Peer]]) -> bool:
        """Whether it copies exactly these buckets, each from one of these donors."""
        known = {spec.index: {peer.node for peer in peers} for spec, peers in donors.items()}
        asked = {index: copy.donor for index, copy in self._copies.items()}
        return self.is_sound and asked.keys() == known.keys() and all(donor in known[i] for i, donor in asked.items())

    def tell_instead(self, tell: Tell) -> None:
        """Calls ``tell`` from now on, and at once with the present status."""
        self._tell, self._told = tell, None
        self._tell_status()

    async def as_of(self, commit: Commit, patience: float) -> dict[int, Bucket]:
        """The buckets whose copies include the step of ``commit``, the last one.

        Waits up to ``patience`` seconds for tensors that are being received. If a donor was lost before it announced the commit,
        the step is applied here.
        """

        def settled() -> bool:
            return all(not c.started or (c.step is not None and c.step >= commit.step) for c in self._copies.values())

        async with self._changed:
            try:
                async with asyncio.timeout(patience):
                    await self._changed.wait_for(settled)
            except TimeoutError:
                log.warning("the standby's copies are not all as of step %d", commit.step)
        for copy in self._copies.values():
            follows = copy.step is not None and self._rounds.next_rest(copy.step) == commit.step
            if follows and copy.voted is not None and copy.voted[0] == commit.generation:
                self._begin_update(copy, commit.step, terms_of(commit, copy.bucket.spec))
        await self._updates()
        return {index: copy.bucket for index, copy in self._copies.items() if copy.step == commit.step}

    def parameters(self, device: torch.device, dtype: torch.dtype) -> tuple[int, dict[int, torch.Tensor]] | None:
        """The last step in the copies, and by bucket a copy of their parameters on ``device``. None while the copies change, or
        are as of several steps. From any thread."""
        steps = {copy.step for copy in self._copies.values()}
        step = min((each for each in steps if each is not None), default=None)
        if step is None or len(steps) > 1:
            return None
        found = {index: copy.bucket.parameters.to(device, dtype, copy=True) for index, copy in self._copies.items()}
        return (step, found) if {copy.step for copy in self._copies.values()} == steps else None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._updates()

    def _ask(self, indices: Iterable[int]) -> None:
        """Asks for each bucket at the donor that gives least so far."""
        load: dict[str, int] = {}
        asked: dict[str, tuple[Peer, list[int]]] = {}
        for index in indices:
            copy = self._copies[index]
            if copy.donors:
                donor = min(copy.donors, key=lambda peer: load.get(peer.node, 0))
                copy.donor = donor.node
                load[donor.node] = load.get(donor.node, 0) + copy.bucket.spec.size
                asked.setdefault(donor.node, (donor, []))[1].append(index)
        for donor, buckets in asked.values():
            task = asyncio.create_task(self._receive(donor, buckets))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._tell_status()

    async def _receive(self, donor: Peer, indices: Collection[int]) -> None:
        """Reads one donor's stream until it breaks, then asks the next donors."""
        request = StandbyRequest(buckets=indices, shared=self._shared).SerializeToString()
        try:
            target = self._dialler.target(donor)
            async with self._dialler.open(donor.node, target, self._run.lease_seconds) as channel:
                async for frame in method(channel, "Standby")(request):
                    header, payload = parse(frame)
                    if header.index not in indices:
                        raise FrameError(FrameProblem.UNEXPECTED, f"bucket {header.index} was not asked for")
                    await self._take(self._copies[header.index], header, payload)
            why = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except FrameError as error:
            why = f"it sent a frame that is refused: {error}"
        except Exception as error:  # out of memory, for one: the coordinator must be told
            log.exception("copying from %s failed", donor.node)
            why = f"{type(error).__name__}: {error}"
        self._problem = f"{donor.node}: {why}"
        log.info("buckets %s can no longer be copied from %s", sorted(indices), self._problem)
        async with self._changed:
            for index in indices:
                copy = self._copies[index]
                copy.started = False  # the copy stays good while no further step is applied
                copy.have = 0
                copy.received.clear()
                copy.arriving.begin_again()
                copy.donors = [peer for peer in copy.donors if peer.node != donor.node]
            self._changed.notify_all()
        self._ask(indices)

    async def _take(self, copy: _Copy, header: Header, payload: memoryview) -> None:
        """One frame: the next piece of the bucket's state, or of a step that may follow. Raises FrameError."""
        if copy.applying is not None:  # begun by `as_of`
            await asyncio.wait((copy.applying,))
        if header.kind is Kind.COMMITTED and header.step == copy.applied == copy.step:
            return  # `as_of` was faster
        size = bucket_bytes(copy.bucket.spec, copy.bucket.parameters.dtype, shared=self._shared)
        totals, step = {Kind.STATE: size}, self._rounds.rested(header.step)
        if copy.started and copy.step is not None:
            totals, step = {}, self._rounds.next_rest(copy.step)
            updates = 0 if self._shared else sum(copy.bucket.spec.matrix_sizes)
            if header.total <= copy.bucket.parameters.nbytes + updates * UPDATES_DTYPE.itemsize:
                totals[Kind.UPDATE] = header.total  # under a codec, or where most gradients are zero, it is less
            if copy.voted is not None:
                totals[Kind.COMMITTED] = TERMS.size
        wanted = (step, totals.get(header.kind), copy.have)
        if (header.step, header.total, header.offset) != wanted:
            raise FrameError(FrameProblem.UNEXPECTED, f"{header.kind.name} {header.index} of step {header.step}")
        if copy.empty:
            await copy.arriving.add(payload)
        else:
            copy.received += payload
        copy.have += len(payload)
        if copy.have < header.total:
            return
        await copy.arriving.flush()
        copy.have, whole, copy.received = 0, copy.received, bytearray()
        match header.kind:
            case Kind.STATE:
                copy.step, copy.bucket.donors = None, (copy.donor,)
                await asyncio.to_thread(copy.bucket.load, whole, shared=self._shared)
                copy.step, copy.started, copy.voted, copy.empty = step, True, None, False
            case Kind.UPDATE:
                updates = 0 if self._shared else sum(copy.bucket.spec.matrix_sizes)
                sums = await asyncio.to_thread(_sums, copy.bucket, header.codec, whole, updates)
                copy.voted = header.generation, *sums
            case Kind.COMMITTED:
                await asyncio.shield(self._begin_update(copy, step, Terms(*TERMS.unpack(whole))))
        copy.newest = header.part
        async with self._changed:
            self._changed.notify_all()
        self._tell_status()

    def _begin_update(self, copy: _Copy, step: int, terms: Terms) -> asyncio.Future[None]:
        """Applies the gradients voted for, in a thread. They are taken here and now, on the event loop, so that no other caller
        can apply them again."""
        assert copy.voted is not None
        (_, gradients, updates), copy.voted = copy.voted, None
        copy.step, copy.applied = None, step  # None until all of it has changed

        def update() -> None:
            bucket, train = copy.bucket, self._run.train
            if self._shared:
                outer_step(terms.outer, bucket, gradients)
            elif len(gradients):
                trained = self._rounds.trained(step) - self._trained_before
                inner_step(train, trained, terms, bucket, gradients, updates)
            copy.step = step

        copy.applying = asyncio.get_running_loop().run_in_executor(None, update)
        return copy.applying

    async def _updates(self) -> None:
        """Waits until no update is being applied."""
        if applying := [copy.applying for copy in self._copies.values() if copy.applying is not None]:
            await asyncio.wait(applying)

    def _tell_status(self) -> None:
        problem = "" if self.is_sound else self._problem or "some layers have no donor"
        copies = self._copies.values()
        step, voted = self._common_step()
        if not problem and (step is None or any(copy.newest > self._rounds.next_rest(step) for copy in copies)):
            return
        status = StandbyProgress(step=step or 0, voted=voted, problem=problem[:MOST_CHARACTERS])
        if status != self._told:
            if self._told is None and not problem:
                log.info("standby: %d buckets are copied as of step %d and kept up", len(self), status.step)
            log.debug("standby: as of step %d%s", status.step, ", with the next step's gradients" if voted else "")
            self._told = status
            self._tell(status)

    def _common_step(self) -> tuple[int | None, int]:
        """``step`` and ``voted`` as in StandbyProgress; None while parts differ."""
        steps = [copy.step for copy in self._copies.values() if copy.step is not None]
        if len(steps) < len(self._copies):
            return None, 0
        step = min(steps)
        generations = {c.voted[0] if c.voted is not None else 0 for c in self._copies.values() if c.step == step}
        voted = generations.pop() if len(generations) == 1 else 0
        newest = max(steps)
        return (step, voted) if newest == step or (newest == self._rounds.next_rest(step) and voted) else (None, 0)


def _sums(bucket: Bucket, codec: int, data: bytearray, updates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients, and this many of Muon's updates. Raises FrameError."""
    try:
        return unpack(Codec(codec), data, bucket.spec.size, bucket.parameters.dtype, updates)
    except ValueError as error:
        raise FrameError(FrameProblem.MALFORMED, f"the gradients of bucket {bucket.spec.index}: {error}") from None
