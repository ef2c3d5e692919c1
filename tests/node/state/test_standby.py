"""A node that follows others has their state, bit for bit, step after step, whatever donor it comes from."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
import torch

from dtfm.node.host import trace
from dtfm.node.host.trace import Beside
from dtfm.node.model.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.optimizer import adamw, decayed_ranges
from dtfm.node.state import state_store
from dtfm.node.state.recovery import fetch_states
from dtfm.node.state.standby import Copied, Following
from dtfm.node.state.state_store import MAX_BEHIND, NORM, Follower, Held, Holding, Piece
from dtfm.node.transport.peer_server import PeerServer
from dtfm.protos.control_pb2 import Commit, Peer
from dtfm.protos.frame import Kind, parse
from dtfm.protos.plan_pb2 import Run
from tests.node.allocated import most_allocated
from tests.protos.members import member

GENERATION = 2
RUN = Run(
    lease_seconds=5,
    train=Run.Train(steps=100, learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, clip_norm=1),
)
# The first is several frames long.
SPECS = [BucketSpec(0, (0,), (("w", (700, 500)), ("b", (500,)))), BucketSpec(1, (1,), (("v", (7, 3)),))]


class Donor:
    """A node that trains buckets on gradients that are equal on all donors; ``on_frame`` is called after every frame of state
    that it gave."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holding = Holding()
        self.buckets = {spec.index: Bucket(spec, torch.device("cpu"), torch.float32) for spec in SPECS}
        self.holding.replace(Held(3, self.buckets))
        self.given = 0
        self.train_while_giving = 0
        self.server = PeerServer(self.holding, self._gave)
        self.server.become(member(name))
        self.peer = Peer()

    async def _gave(self, _: float) -> None:
        self.given += 1
        if self.train_while_giving:
            self.train_while_giving -= 1
            self.train()

    @property
    def step(self) -> int:
        return self.holding.held.step

    def train(self, commit: bool = True, generation: int = GENERATION) -> None:
        step = self.step + 1
        self.holding.retract()
        for index, bucket in self.buckets.items():
            generator = torch.Generator().manual_seed(100 * step + index + 10 * (generation - GENERATION))
            bucket.gradients.copy_(torch.randn(bucket.spec.size, generator=generator))
        self.holding.vote(generation)
        if commit:
            self.commit()

    def commit(self) -> None:
        step = self.step + 1
        self.holding.apply(step, 2.5, lambda: self._update(step))

    def _update(self, step: int) -> None:
        for b in self.buckets.values():
            ranges = decayed_ranges(b.spec.parameters)
            adamw(RUN.train, step, 2.5, b.parameters, b.gradients, b.exp_avg, b.exp_avg_sq, ranges)


@pytest.fixture
async def donors() -> AsyncIterator[list[Donor]]:
    both = [Donor("a"), Donor("b")]
    for donor in both:
        donor.peer = Peer(node=donor.name, address=f"127.0.0.1:{await donor.server.start('127.0.0.1:0')}")
        donor.train()
    yield both
    for donor in both:
        await donor.server.stop()


def follow(donors: Sequence[Donor]) -> tuple[Following, asyncio.Future[str]]:
    """What follows both buckets, and what is told first: a problem, or nothing."""
    near: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def tell(copied: Copied) -> None:
        if not near.done():
            near.set_result(copied.problem)

    peers = {spec: [donor.peer for donor in donors] for spec in SPECS}
    following = Following(RUN, torch.device("cpu"), torch.float32, peers, member("me"), tell)
    return following, near


def committed(step: int) -> Commit:
    return Commit(generation=GENERATION, step=step, gradient_norm=2.5)


async def until_at(following: Following, step: int) -> None:
    async with following._changed:
        await following._changed.wait_for(lambda: {copy.at for copy in following._copies.values()} == {step})


def same(copied: dict[int, Bucket], donor: Donor) -> bool:
    return copied.keys() == donor.buckets.keys() and all(
        torch.equal(mine, theirs)
        for index, bucket in copied.items()
        for mine, theirs in zip(bucket.state, donor.buckets[index].state, strict=True)
    )


async def test_state_comes_once_and_then_every_step_is_applied_here_too(donors: list[Donor]) -> None:
    following, near = follow(donors)
    assert await near == ""
    for _ in range(5):
        for donor in donors:
            donor.train()
        assert same(await following.at(committed(donors[0].step), 10), donors[0])
    await following.close()


async def test_a_copy_takes_no_more_memory_than_its_state_and_the_gradients_that_come(
    donors: list[Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(trace, "_scales", [lambda kept, size: told.append(size) if kept is Beside.COPIES else None])
    state = sum(bucket_bytes(spec, torch.float32) for spec in SPECS)
    peers = {spec: [donor.peer for donor in donors] for spec in SPECS}
    made: list[Following] = []
    cpu = torch.device("cpu")
    allocated = most_allocated(
        lambda: made.append(Following(RUN, cpu, torch.float32, peers, member("me"), lambda _: None))
    )
    (following,) = made
    await until_at(following, 4)
    assert max(told) == state
    assert allocated < state * 1.1
    for donor in donors:
        donor.train()
    await until_at(following, 5)
    assert max(told) <= state + sum(b.parameters.nbytes + NORM.size for b in donors[0].buckets.values())
    assert all(bucket._gradients is None for bucket in (await following.at(committed(5), 10)).values())
    await following.close()


async def test_all_donors_give(donors: list[Donor]) -> None:
    following, near = follow(donors)
    assert await near == ""
    await following.close()
    assert all(donor.given for donor in donors)


async def test_steps_that_are_applied_while_the_state_is_on_its_way_are_not_missed(donors: list[Donor]) -> None:
    donors[0].train_while_giving = 4
    following, near = follow(donors[:1])
    assert await near == ""
    copied = await following.at(committed(8), 10)
    assert donors[0].step == 8
    assert same(copied, donors[0])
    await following.close()


async def test_every_step_that_it_has_caught_up_with_is_told(donors: list[Donor]) -> None:
    told: asyncio.Queue[Copied] = asyncio.Queue()
    following, near = follow(donors[:1])
    assert await near == ""
    following.tell_instead(told.put_nowait)
    for step in (4, 5):
        assert await told.get() == Copied(step)
        donors[0].train(commit=False)
        assert await told.get() == Copied(step, GENERATION)
        donors[0].commit()
    assert await told.get() == Copied(6)
    await following.close()


async def test_a_donor_that_is_lost_between_commit_and_update_is_survived(donors: list[Donor]) -> None:
    told: asyncio.Queue[Copied] = asyncio.Queue()
    following, near = follow(donors[:1])
    assert await near == ""
    following.tell_instead(told.put_nowait)
    assert await told.get() == Copied(4)
    donors[0].train(commit=False, generation=GENERATION - 1)  # called off
    donors[0].train(commit=False)
    while await told.get() != Copied(4, GENERATION):
        pass
    await donors[0].server.stop()
    lost = await told.get()
    assert (lost.step, lost.voted, bool(lost.problem)) == (4, GENERATION, True)
    donors[1].train()
    assert same(await following.at(committed(5), 10), donors[1])
    await following.close()


async def test_a_donor_that_is_lost_while_it_tells_of_a_commit_is_survived(donors: list[Donor]) -> None:
    told: asyncio.Queue[Copied] = asyncio.Queue()
    peers = {spec: [donor.peer] for spec, donor in zip(SPECS, donors, strict=True)}
    following = Following(RUN, torch.device("cpu"), torch.float32, peers, member("me"), told.put_nowait)
    assert await told.get() == Copied(4)
    for donor in donors:
        donor.train(commit=False)
    assert await told.get() == Copied(4, GENERATION)
    donors[0].commit()  # the first bucket goes on, the second hears nothing any more
    async with following._changed:
        await following._changed.wait_for(lambda: following._copies[0].at == 5)
    await donors[1].server.stop()
    lost = await told.get()
    assert (lost.step, lost.voted, bool(lost.problem)) == (4, GENERATION, True)
    assert same(await following.at(committed(5), 10), donors[0])
    await following.close()


async def test_state_from_another_donor_makes_the_old_ones_gradients_stale(donors: list[Donor]) -> None:
    following, near = follow(donors[:1])
    assert await near == ""
    donors[0].train(commit=False)
    async with following._changed:
        await following._changed.wait_for(lambda: all(copy.voted for copy in following._copies.values()))
    donors[1].train()
    for copy in following._copies.values():
        copy.donors.append(donors[1].peer)
    await donors[0].server.stop()
    await until_at(following, 5)
    assert await following.at(Commit(generation=GENERATION, step=6, gradient_norm=2.5), 0.2) == {}
    await following.close()


async def test_gradients_of_an_attempt_that_was_called_off_are_never_applied(donors: list[Donor]) -> None:
    following, near = follow(donors[:1])
    assert await near == ""
    donors[0].train(commit=False)
    async with following._changed:
        await following._changed.wait_for(lambda: all(copy.voted for copy in following._copies.values()))
    await donors[0].server.stop()
    async with following._changed:
        await following._changed.wait_for(lambda: not following.sound)
    assert await following.at(Commit(generation=GENERATION + 1, step=5, gradient_norm=2.5), 10) == {}
    await following.close()


async def test_a_donor_that_dies_is_replaced_by_another(donors: list[Donor]) -> None:
    following, near = follow(donors)
    assert await near == ""
    await donors[0].server.stop()
    donors[1].train()
    await until_at(following, donors[1].step)
    assert same(await following.at(committed(donors[1].step), 10), donors[1])
    assert following.sound
    await following.close()


async def test_a_bucket_that_nobody_has_is_named(donors: list[Donor]) -> None:
    for donor in donors:
        donor.holding.replace(Held(4, {0: donor.buckets[0]}))
    following, near = follow(donors)
    assert "NOT_HELD: buckets [1] are not held here" in await near
    assert not following.sound
    await following.close()


async def test_after_going_back_to_another_past_it_is_followed_from_there(donors: list[Donor]) -> None:
    following, near = follow(donors)
    assert await near == ""
    for donor in donors:
        donor.holding.replace(Held(2, donor.buckets))
        donor.buckets[0].parameters.fill_(7)
    await until_at(following, 2)
    assert same(await following.at(committed(2), 10), donors[0])
    await following.close()


async def test_a_follower_that_is_too_slow_is_let_go_and_told_so(donors: list[Donor]) -> None:
    follower = donors[0].holding.follow([1], asyncio.get_running_loop())
    sent = follower.frames()
    await anext(sent)
    for _ in range(MAX_BEHIND + 1):
        donors[0].train()
    with pytest.raises(LookupError, match="TOO_SLOW"):
        [frame async for frame in sent]
    follower.close()


async def test_a_follower_for_whom_too_many_bytes_wait_is_let_go_but_two_steps_may_always(
    donors: list[Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "MOST_WAITING_BYTES", SPECS[1].size)
    follower = donors[0].holding.follow([1], asyncio.get_running_loop())
    sent = follower.frames()
    await anext(sent)
    for ended in (False, False, True):
        donors[0].train()
        await asyncio.sleep(0)  # it hears of it on this loop
        assert bool(follower.ended) is ended
    with pytest.raises(LookupError, match="TOO_SLOW"):
        [frame async for frame in sent]
    follower.close()


async def test_of_a_follower_that_has_gone_nothing_is_kept_though_a_step_was_on_its_way_to_it(
    donors: list[Donor],
) -> None:
    follower = donors[0].holding.follow([1], asyncio.get_running_loop())
    sent = follower.frames()
    await anext(sent)
    donors[0].train()
    follower.close()  # before this loop hears of the step
    await asyncio.sleep(0)
    with pytest.raises(LookupError, match="no more"):
        [frame async for frame in sent]
    assert not trace._beside[Beside.UPDATES]


async def test_a_step_counts_as_on_its_way_from_before_it_is_copied_until_all_of_it_is_sent(
    donors: list[Donor],
) -> None:
    follower = donors[0].holding.follow([0], asyncio.get_running_loop())
    sent = follower.frames()
    whole = False
    while not whole:
        header, payload = parse(await anext(sent))
        whole = header.offset + len(payload) == header.total
    on_its_way = trace._beside[Beside.UPDATES]
    gradients = donors[0].buckets[0].gradients.nbytes
    donors[0].train(commit=False)
    assert on_its_way[follower] == gradients, "though this loop has not yet heard of it"
    left = gradients
    while left:
        left -= len(parse(await anext(sent))[1])
        assert on_its_way[follower] == gradients
    donors[0].commit()
    assert parse(await anext(sent))[0].kind is Kind.COMMITTED
    assert on_its_way[follower] == NORM.size
    follower.close()


async def test_the_copy_of_one_bucket_is_let_go_of_before_the_next_is_copied(
    donors: list[Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, copied = donors[0].holding, list[threading.Event]()
    begin = source.begin

    def watched(follower: Follower, bucket: int) -> Piece:
        # The thread that made the one before lets go of it only after whoever waited for it goes on.
        assert all(gone.wait(10) for gone in copied)
        header, data = begin(follower, bucket)
        copy, gone = np.frombuffer(data, np.uint8).copy(), threading.Event()
        weakref.finalize(copy, gone.set)
        copied.append(gone)
        return header, copy.data

    monkeypatch.setattr(source, "begin", watched)
    follower = source.follow([0, 1], asyncio.get_running_loop())
    async for frame in follower.frames():
        if parse(frame)[0].index == 1:
            break
        await asyncio.sleep(0)  # as writing it does
    assert len(copied) == 2
    follower.close()


async def test_in_a_pause_state_is_fetched_from_all_donors_at_once(donors: list[Donor]) -> None:
    mine = {spec.index: Bucket(spec, torch.device("cpu"), torch.float32) for spec in SPECS}
    peers = [donor.peer for donor in donors]
    await fetch_states([(bucket, peers) for bucket in mine.values()], 4, 1, member("me"), 10)
    assert same(mine, donors[0])
    assert all(donor.given for donor in donors)
    with pytest.raises(ConnectionError, match="bucket 1 as of step 9 could not be had"):
        await fetch_states([(mine[1], peers)], 9, 1, member("me"), 0.3)
