"""A standby has the same state as its donors, bit for bit, step after step, whichever donor it comes from."""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtfm.kernels.codec import Codec, decode, encode
from dtfm.node.host.work import WORK
from dtfm.node.model.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.optimizer.optimizer import Terms, inner_step, outer_step
from dtfm.node.state import state_store
from dtfm.node.state.recovery import fetch_states
from dtfm.node.state.standby import StandbyCopies
from dtfm.node.state.state_store import MAX_BEHIND, TERMS, Donation, HeldState, StateStore, Subscription
from dtfm.node.transport.peer_server import PeerServer
from dtfm.protos import control_pb2 as wire
from dtfm.protos.control_pb2 import Commit, Peer, StandbyProgress
from dtfm.protos.frame import STATE_CHUNK_BYTES, Kind, parse
from dtfm.protos.identity.credentials import make_authority, make_key
from dtfm.protos.peer_pb2 import StandbyRequest
from dtfm.protos.plan_pb2 import Run
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds
from tests.node.allocated import most_allocated
from tests.node.dialling import dialler
from tests.protos.members import NOW, member

CPU = torch.device("cpu")
GENERATION = 2
RATE = 1e-2
RUN = Run(
    lease_seconds=5,
    train=Run.Train(weight_decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, clip_norm=1),
)
"""Its weight decay and bound of the norm are the first ones: each commit has others."""
# The first is several frames long.
SPECS = [BucketSpec(0, (0,), (("w", (700, 500)), ("b", (500,)))), BucketSpec(1, (1,), (("v", (7, 3)),))]


class Donor:
    """A node that trains buckets, with the same gradients on every donor. It is as of step 4 when a test begins."""

    codec = Codec.OFF
    """With which gradients came from other replicas."""

    def __init__(self, name: str, specs: Sequence[BucketSpec] = SPECS, rounds: Rounds = NO_ROUNDS) -> None:
        self.name, self.rounds = name, rounds
        self.store = StateStore()
        self.buckets = {spec.index: Bucket(spec, CPU, torch.float32) for spec in specs}
        for bucket in self.buckets.values():
            bucket.rest(rounds=rounds.count > 0)
        self.store.replace(HeldState(3, self.buckets, rounds))
        self.given, self.given_bytes = 0, 0.0
        self.train_while_giving = 0
        self._giving = asyncio.Event()
        self.server = PeerServer(self.store, self._gave)
        self.server.become(member(name))
        self.peer = Peer()

    async def gives(self, frames: int) -> None:
        """Returns when it has given this many frames in all."""
        while self.given < frames:
            self._giving.clear()
            await self._giving.wait()

    async def _gave(self, size: float) -> None:
        self.given += 1
        self.given_bytes += size
        self._giving.set()
        if self.train_while_giving:
            self.train_while_giving -= 1
            self.train()

    @property
    def step(self) -> int:
        return self.store.held.step

    def train(self, commit: bool = True, generation: int = GENERATION) -> None:
        step = self.step + 1
        self.store.retract()
        for index, bucket in self.buckets.items():
            generator = torch.Generator().manual_seed(100 * step + index + 10 * (generation - GENERATION))
            made = encode(self.codec, torch.randn(bucket.spec.size, generator=generator))
            bucket.gradients.copy_(decode(made.codec, made.data, bucket.spec.size, torch.float32, CPU))
            bucket.updates.copy_(torch.randn(len(bucket.updates), generator=generator))
        self.store.vote(generation, self.codec)
        if commit:
            self.commit()

    def commit(self) -> None:
        step = self.step + 1
        self.store.apply(committed(step), lambda: self._update(step))

    def _update(self, step: int) -> None:
        for bucket in self.buckets.values():
            if self.rounds.exchanges(step):
                outer_step(terms_at(step).outer, bucket, bucket.gradients)
                continue
            inner_step(RUN.train, step, terms_at(step), bucket, bucket.gradients, bucket.updates)


@pytest.fixture
async def donors() -> AsyncIterator[list[Donor]]:
    both = [Donor("a"), Donor("b")]
    for donor in both:
        donor.peer = Peer(node=donor.name, candidates=[f"127.0.0.1:{await donor.server.start('127.0.0.1:0')}"])
        donor.train()
    yield both
    for donor in both:
        await donor.server.stop()


class Standby:
    """Copies of these buckets from these donors, and what they tell."""

    def __init__(
        self, donors: Sequence[Donor], specs: Sequence[BucketSpec] = SPECS, rounds: Rounds = NO_ROUNDS
    ) -> None:
        self._told: asyncio.Queue[StandbyProgress] = asyncio.Queue()
        self.statuses: list[StandbyProgress] = []
        copied = [(Bucket(spec, CPU, torch.float32), [donor.peer for donor in donors]) for spec in specs]
        self.dialler = dialler("me")
        self.copies = StandbyCopies(RUN, copied, self.dialler, self._told.put_nowait, (rounds, 0))

    async def tells(self) -> StandbyProgress:
        """The next status."""
        self.statuses.append(await asyncio.wait_for(self._told.get(), 30))
        return self.statuses[-1]

    async def until(self, step: int, voted: int = 0) -> None:
        while await self.tells() != StandbyProgress(step=step, voted=voted):
            pass


class Threads(ThreadPoolExecutor):
    """``asked`` is set when it gets work."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.asked = asyncio.Event()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        self.asked.set()
        return super().submit(work, *arguments, **keywords)


def committed(step: int, generation: int = GENERATION) -> Commit:
    terms = terms_at(step)
    return Commit(
        generation=generation,
        step=step,
        learning_rate=terms.learning_rate,
        weight_decay=terms.weight_decay,
        clips=[Commit.Clip(first_layer=0, past_last_layer=len(SPECS), factor=terms.clip)],
        outer=wire.OuterStep(rate=terms.outer_rate, momentum=terms.outer_momentum),
    )


def terms_at(step: int) -> Terms:
    return Terms(0.8 / step, RATE / step, weight_decay=step / 10, outer_rate=1 / step, outer_momentum=1 - 1 / step)


def same(copied: Mapping[int, Bucket], donor: Donor, specs: Sequence[BucketSpec] = SPECS) -> bool:
    return copied.keys() == {spec.index for spec in specs} and all(
        torch.equal(mine, theirs)
        for index, bucket in copied.items()
        for mine, theirs in zip(bucket.state, donor.buckets[index].state, strict=True)
    )


async def test_state_comes_once_and_then_every_step_is_applied_here_too(donors: list[Donor]) -> None:
    standby = Standby(donors)
    await standby.until(4)
    for _ in range(5):
        for donor in donors:
            donor.train()
        assert same(await standby.copies.as_of(committed(donors[0].step), 10), donors[0])
    await standby.copies.close()


@pytest.mark.parametrize("codec", [Codec.OFF, Codec.I4B64])
async def test_with_muon_the_copy_moves_by_the_updates_that_the_owner_of_a_matrix_found(codec: Codec) -> None:
    specs = [replace(SPECS[0], orthogonal=frozenset({"w"})), SPECS[1]]
    donor = Donor("a", specs)
    donor.codec = codec
    donor.peer = Peer(node="a", candidates=[f"127.0.0.1:{await donor.server.start('127.0.0.1:0')}"])
    donor.train()
    standby = Standby([donor], specs)
    await standby.until(4)
    donor.train()
    donor.train(commit=False)
    await standby.until(5, voted=GENERATION)
    donor.commit()
    await standby.until(6)
    copied = await standby.copies.as_of(committed(6), 10)
    assert same(copied, donor, specs)
    assert copied[0].moments[0].any()
    await standby.copies.close()
    await donor.server.stop()


@pytest.mark.parametrize("codec", [Codec.OFF, Codec.TOPK, Codec.I4B64])
async def test_with_rounds_the_copy_is_for_a_new_island_and_follows_exchanges_alone(codec: Codec) -> None:
    specs, rounds = [replace(spec, has_momentum=True) for spec in SPECS], Rounds(0, 3, 1)
    donor = Donor("a", specs, rounds)
    donor.codec = codec
    donor.peer = Peer(node="a", candidates=[f"127.0.0.1:{await donor.server.start('127.0.0.1:0')}"])
    for _ in range(4):  # steps 4 to 7, of which 6 is an exchange
        donor.train()
    standby = Standby([donor], specs, rounds)
    await standby.until(6)
    for index, bucket in (await standby.copies.as_of(committed(6), 10)).items():
        assert torch.equal(bucket.parameters, donor.buckets[index].shared[0])
    for _ in range(5):
        donor.train()
    donor.train(commit=False)
    await standby.until(12)
    copied = await standby.copies.as_of(committed(12), 10)
    assert copied.keys() == donor.buckets.keys()
    for index, bucket in copied.items():
        trained = donor.buckets[index]
        assert all(map(torch.equal, bucket.shared, trained.shared))
        assert torch.equal(bucket.parameters, trained.parameters)
        assert not bucket.moments[0].any()
        assert trained.moments[0].any()
    await standby.copies.close()
    await donor.server.stop()


async def test_of_sparse_gradients_only_those_come_that_are_not_0(donors: list[Donor]) -> None:
    donors[0].codec = Codec.TOPK
    standby = Standby(donors[:1])
    await standby.until(4)
    before = donors[0].given_bytes
    donors[0].train()
    await standby.until(5)
    assert donors[0].given_bytes - before < SPECS[0].size * 4 / 20
    assert same(await standby.copies.as_of(committed(5), 10), donors[0])
    await standby.copies.close()


async def test_a_copy_begins_with_no_more_memory_than_its_state_takes(donors: list[Donor]) -> None:
    state = sum(bucket_bytes(spec, torch.float32) for spec in SPECS)
    made: list[Standby] = []
    allocated = most_allocated(lambda: made.append(Standby(donors)))
    (standby,) = made
    assert allocated < state * 1.1
    await standby.copies.close()


async def test_all_donors_give(donors: list[Donor]) -> None:
    standby = Standby(donors)
    await standby.until(4)
    await standby.copies.close()
    assert all(donor.given for donor in donors)


async def test_steps_that_are_applied_while_the_state_is_on_its_way_are_not_missed(donors: list[Donor]) -> None:
    donors[0].train_while_giving = 4
    standby = Standby(donors[:1])
    await standby.tells()
    copied = await standby.copies.as_of(committed(8), 10)
    assert donors[0].step == 8
    assert same(copied, donors[0])
    await standby.copies.close()


async def test_every_step_that_it_has_caught_up_with_is_told(donors: list[Donor]) -> None:
    told: asyncio.Queue[StandbyProgress] = asyncio.Queue()
    standby = Standby(donors[:1])
    await standby.until(4)
    standby.copies.tell_instead(told.put_nowait)
    for step in (4, 5):
        assert await told.get() == StandbyProgress(step=step)
        donors[0].train(commit=False)
        assert await told.get() == StandbyProgress(step=step, voted=GENERATION)
        donors[0].commit()
    assert await told.get() == StandbyProgress(step=6)
    await standby.copies.close()


async def test_a_donor_that_is_lost_between_commit_and_update_is_survived(donors: list[Donor]) -> None:
    standby = Standby(donors[:1])
    await standby.until(4)
    donors[0].train(commit=False, generation=GENERATION - 1)  # aborted
    donors[0].train(commit=False)
    await standby.until(4, GENERATION)
    await donors[0].server.stop()
    lost = await standby.tells()
    assert (lost.step, lost.voted, bool(lost.problem)) == (4, GENERATION, True)
    donors[1].train()
    assert same(await standby.copies.as_of(committed(5), 10), donors[1])
    await standby.copies.close()


async def test_a_donor_that_is_lost_while_others_tell_of_a_commit_is_survived(donors: list[Donor]) -> None:
    told: asyncio.Queue[StandbyProgress] = asyncio.Queue()
    copied = [(Bucket(spec, CPU, torch.float32), [donor.peer]) for spec, donor in zip(SPECS, donors, strict=True)]
    copies = StandbyCopies(RUN, copied, dialler("me"), told.put_nowait)
    assert await told.get() == StandbyProgress(step=4)
    for donor in donors:
        donor.train(commit=False)
    assert await told.get() == StandbyProgress(step=4, voted=GENERATION)
    donors[0].commit()  # the first bucket goes on, the second hears no more
    while (await copies.as_of(committed(5, generation=GENERATION + 1), 0.02)).keys() != {0}:
        pass
    await donors[1].server.stop()
    lost = await told.get()
    assert (lost.step, lost.voted, bool(lost.problem)) == (4, GENERATION, True)
    assert same(await copies.as_of(committed(5), 10), donors[0])
    await copies.close()


async def test_state_from_another_donor_makes_the_old_ones_gradients_stale(donors: list[Donor]) -> None:
    standby = Standby(donors, SPECS[:1])
    await standby.until(4)
    donors[0].train(commit=False)
    await standby.until(4, GENERATION)
    donors[1].train()
    await donors[0].server.stop()
    await standby.until(5)
    assert same(await standby.copies.as_of(committed(5), 10), donors[1], SPECS[:1])
    assert await standby.copies.as_of(committed(6), 0.2) == {}
    await standby.copies.close()


async def test_gradients_of_an_aborted_attempt_are_never_applied(donors: list[Donor]) -> None:
    standby = Standby(donors[:1])
    await standby.until(4)
    donors[0].train(commit=False)
    await standby.until(4, GENERATION)
    await donors[0].server.stop()
    assert (await standby.tells()).problem
    assert await standby.copies.as_of(committed(5, generation=GENERATION + 1), 10) == {}
    await standby.copies.close()


async def test_a_commit_that_arrives_just_after_the_wait_for_it_timed_out_is_applied_once(donors: list[Donor]) -> None:
    standby = Standby(donors[:1])
    await standby.until(4)
    donors[0].train(commit=False)
    await standby.until(4, GENERATION)
    go_on, threads = threading.Event(), Threads(1)
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(go_on.wait)  # updates wait for this
    threads.asked.clear()
    taking = asyncio.create_task(standby.copies.as_of(committed(5), 0))
    await threads.asked.wait()
    given = donors[0].given
    donors[0].commit()
    donors[0].train(commit=False)
    await donors[0].gives(given + 5)  # two norms, and the next step's gradients in three frames
    for _ in range(100):
        await asyncio.sleep(0)  # they arrive
    go_on.set()
    taken = await taking
    await standby.until(5, GENERATION)
    donors[0].commit()
    await standby.until(6)
    assert not any(status.problem for status in standby.statuses)
    assert same(taken, donors[0])
    await standby.copies.close()


async def test_a_donor_that_dies_is_replaced_by_another(donors: list[Donor]) -> None:
    standby = Standby(donors)
    await standby.until(4)
    await donors[0].server.stop()
    donors[1].train()
    await standby.until(5)
    assert same(await standby.copies.as_of(committed(5), 10), donors[1])
    assert standby.copies.is_sound
    await standby.copies.close()


async def test_another_donor_is_asked_under_the_newest_identity(donors: list[Donor]) -> None:
    """The one that it began with may have ended long ago."""
    standby = Standby(donors)
    await standby.until(4)
    standby.dialler.identity = member("me", make_authority(make_key(), NOW))  # whom no donor accepts
    await donors[0].server.stop()
    assert "UNAVAILABLE" in (await standby.tells()).problem
    await standby.copies.close()


async def test_a_bucket_that_no_node_has_is_named(donors: list[Donor]) -> None:
    for donor in donors:
        donor.store.replace(HeldState(4, {0: donor.buckets[0]}))
    standby = Standby(donors)
    assert "NOT_HELD: buckets [1] are not held here" in (await standby.tells()).problem
    assert not standby.copies.is_sound
    await standby.copies.close()


async def test_after_going_back_to_an_earlier_step_it_is_copied_from_there(donors: list[Donor]) -> None:
    standby = Standby(donors)
    await standby.until(4)
    for donor in donors:
        donor.store.replace(HeldState(2, donor.buckets))
        donor.buckets[0].parameters.fill_(7)
    await standby.until(2)
    assert same(await standby.copies.as_of(committed(2), 10), donors[0])
    await standby.copies.close()


async def test_peers_wait_for_a_step_that_is_being_applied_and_the_lock_is_free(donors: list[Donor]) -> None:
    store = donors[0].store
    applying, go_on = threading.Event(), threading.Event()

    def update() -> None:
        applying.set()
        assert go_on.wait(10)

    donors[0].train(commit=False)
    subscription = store.subscribe(StandbyRequest(buckets=[0, 1]), asyncio.get_running_loop())
    with ThreadPoolExecutor(2) as threads:
        applied = threads.submit(store.apply, committed(5), update)
        assert applying.wait(10)
        started = threads.submit(store.start, subscription, 0)
        subscription.close()  # on this thread, while the step is applied
        assert not started.done()
        go_on.set()
        applied.result(10)
        assert started.result(10)[0].step == 5


async def test_a_standby_that_is_too_slow_is_dropped_and_told_so(donors: list[Donor]) -> None:
    subscription = donors[0].store.subscribe(StandbyRequest(buckets=[1]), asyncio.get_running_loop())
    sent = subscription.frames()
    await anext(sent)
    for _ in range(MAX_BEHIND + 1):
        donors[0].train()
    with pytest.raises(LookupError, match="TOO_SLOW"):
        [frame async for frame in sent]
    subscription.close()


async def test_a_standby_for_which_too_many_bytes_wait_is_dropped_but_two_steps_may_always_wait(
    donors: list[Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "MOST_WAITING_BYTES", SPECS[1].size)
    subscription = donors[0].store.subscribe(StandbyRequest(buckets=[1]), asyncio.get_running_loop())
    sent = subscription.frames()
    await anext(sent)
    for ended in (False, False, True):
        donors[0].train()
        await asyncio.sleep(0)  # this loop takes the step
        assert bool(subscription.ended) is ended
    with pytest.raises(LookupError, match="TOO_SLOW"):
        [frame async for frame in sent]
    subscription.close()


async def test_nothing_is_kept_for_a_standby_that_has_gone_while_a_step_was_on_its_way(donors: list[Donor]) -> None:
    subscription = donors[0].store.subscribe(StandbyRequest(buckets=[1]), asyncio.get_running_loop())
    sent = subscription.frames()
    await anext(sent)
    donors[0].train()
    subscription.close()  # before this loop takes the step
    await asyncio.sleep(0)
    with pytest.raises(LookupError, match="gone"):
        [frame async for frame in sent]
    assert subscription._waiting_bytes == 0


async def test_a_step_counts_as_waiting_from_before_it_is_copied_until_all_of_it_is_sent(
    donors: list[Donor],
) -> None:
    subscription = donors[0].store.subscribe(StandbyRequest(buckets=[0]), asyncio.get_running_loop())
    sent = subscription.frames()
    whole = False
    while not whole:
        header, payload = parse(await anext(sent))
        whole = header.offset + len(payload) == header.total
    gradients = donors[0].buckets[0].gradients.nbytes
    donors[0].train(commit=False)
    assert subscription._waiting_bytes == gradients, "before this loop has taken it"
    left = gradients
    while left:
        left -= len(parse(await anext(sent))[1])
        assert subscription._waiting_bytes == gradients
    donors[0].commit()
    assert parse(await anext(sent))[0].kind is Kind.COMMITTED
    assert subscription._waiting_bytes == TERMS.size
    subscription.close()


async def test_the_state_of_one_bucket_is_let_go_before_that_of_the_next_is_read(
    donors: list[Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, copied = donors[0].store, list[threading.Event]()
    start = source.start

    def watched(subscription: Subscription, bucket: int) -> Donation:
        # The thread that read it lets go of it only after its waiter goes on.
        assert all(gone.wait(10) for gone in copied)
        header, reading = start(subscription, bucket)
        gone = threading.Event()
        weakref.finalize(reading, gone.set)
        copied.append(gone)
        return header, reading

    monkeypatch.setattr(source, "start", watched)
    subscription = source.subscribe(StandbyRequest(buckets=[0, 1]), asyncio.get_running_loop())
    async for frame in subscription.frames():
        if parse(frame)[0].index == 1:
            break
        await asyncio.sleep(0)  # as writing it does
    assert len(copied) == 2
    subscription.close()


async def test_each_piece_of_state_that_comes_is_progress(donors: list[Donor]) -> None:
    """A slow line does not look like a hang."""
    mine = {spec.index: Bucket(spec, CPU, torch.float32) for spec in SPECS}
    (before, _), peers = WORK.so_far, [donor.peer for donor in donors]
    await fetch_states([(bucket, peers) for bucket in mine.values()], 4, 1, dialler("me"), 10)
    pieces = sum(math.ceil(bucket_bytes(spec, torch.float32) / STATE_CHUNK_BYTES) for spec in SPECS)
    assert WORK.so_far[0] - before >= pieces > len(SPECS)


async def test_state_is_fetched_from_all_donors_at_once(donors: list[Donor]) -> None:
    mine = {spec.index: Bucket(spec, CPU, torch.float32) for spec in SPECS}
    peers = [donor.peer for donor in donors]
    await fetch_states([(bucket, peers) for bucket in mine.values()], 4, 1, dialler("me"), 10)
    assert same(mine, donors[0])
    assert all(donor.given for donor in donors)
    with pytest.raises(ConnectionError, match="bucket 1 as of step 9 could not be fetched"):
        await fetch_states([(mine[1], peers)], 9, 1, dialler("me"), 0.3)
