"""A replica group's gradients become their sum, the same bits on every member."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dtfm.kernels.codec import KEPT, Codec, Encoded
from dtfm.node.host.cuda_streams import Beside
from dtfm.node.model import placement as placement_module
from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.placement import Group, pieces, placement_of, shards
from dtfm.node.training.reduction import bucket_sum, reducer as reducer_module
from dtfm.node.training.reduction.reducer import Final, Reducer, Residuals
from dtfm.node.training.reduction.sending_order import sending_order
from dtfm.node.transport.frame_validation import Expectations, TensorSizes
from dtfm.node.transport.receiver import Arrival, Closed, Receiver
from dtfm.node.transport.sender import What
from dtfm.protos.frame import frames
from dtfm.scheduler.model.plan import Plan, Stage
from tests.node.allocated import most_allocated
from tests.node.training.reduction.together import STEP, group, placed, reduce_together

PIECE = 512


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement_module, "PIECE_ELEMENTS", PIECE)
        pieces.cache_clear()
        yield
    pieces.cache_clear()


@given(members=st.integers(1, 5), sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_all_members_end_with_the_sum_bit_for_bit(members: int, sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes = [f"n{i}" for i in range(members)]
    gradients = {n: {b: torch.randn(size, generator=generator) for b, size in enumerate(sizes)} for n in nodes}
    sums = {b: torch.stack([gradients[n][b].double() for n in nodes]).sum(0) for b in range(len(sizes))}
    reduce_together(gradients, dict.fromkeys(range(len(sizes)), group(*nodes)))
    for b, expected in sums.items():
        torch.testing.assert_close(gradients[nodes[0]][b].double(), expected, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(gradients[n][b], gradients[nodes[0]][b]) for n in nodes)


@pytest.mark.parametrize("codec", [Codec.OFF, Codec.I8B256, Codec.TOPK])
def test_gradients_are_touched_only_where_they_are_computed(monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
    """A GPU may still be computing final gradients. Only work on the side stream waits for it."""
    inside = threading.local()
    nodes = ("a", "b", "c")
    gradients = {n: {0: torch.full((5000,), math.nan)} for n in nodes}

    def computed(node: str) -> Beside:
        values = iter([torch.full((5000,), 1.0)])

        @contextmanager
        def beside() -> Iterator[None]:
            inside.depth = getattr(inside, "depth", 0) + 1
            for value in values:
                gradients[node][0].copy_(value)
            yield
            inside.depth -= 1

        return beside

    of_reducer = ("encode", "encode_with_feedback", "decode", "is_finite")
    for module, name in (*((reducer_module, each) for each in of_reducer), (bucket_sum, "is_finite")):
        real = getattr(module, name)

        def checked(*arguments: Any, real: Callable[..., Any] = real) -> Any:
            assert inside.depth
            return real(*arguments)

        monkeypatch.setattr(module, name, checked)
    reduce_together(gradients, {0: group(*nodes)}, codec, before=computed)
    assert all(torch.equal(gradients[n][0], gradients["a"][0]) for n in nodes)
    assert gradients["a"][0].isfinite().all()


@pytest.mark.parametrize("codec", [Codec.RAW16, Codec.I8B256])
def test_under_a_lossy_codec_members_still_hold_the_same_bits_near_the_sum(codec: Codec) -> None:
    nodes = ("a", "b", "c")
    generator = torch.Generator().manual_seed(1)
    gradients = {n: {0: torch.randn(5000, generator=generator)} for n in nodes}
    expected = torch.stack([gradients[n][0] for n in nodes]).sum(0)
    reduce_together(gradients, {0: group(*nodes)}, codec)
    assert all(torch.equal(gradients[n][0], gradients["a"][0]) for n in nodes)
    assert not torch.equal(gradients["a"][0], expected)
    torch.testing.assert_close(gradients["a"][0], expected, rtol=0, atol=0.12)


@settings(max_examples=settings().max_examples // 2)
@given(
    members=st.integers(2, 4),
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=2),
    steps=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_what_topk_leaves_out_is_carried(
    members: int, sizes: list[int], steps: int, dtype: torch.dtype, seed: int
) -> None:
    """Arrived and left-out elements add up to the changes and KEPT of the earlier leftovers. A member joins each time."""
    generator = torch.Generator().manual_seed(seed)
    carried: dict[str, Residuals] = {}
    for step in range(steps):
        nodes = [f"n{i}" for i in range(members + step)]
        groups = dict.fromkeys(range(len(sizes)), group(*nodes))
        gradients = {
            n: {b: torch.randn(size, generator=generator).to(dtype) for b, size in enumerate(sizes)} for n in nodes
        }
        expected = [
            torch.stack([gradients[n][b].double() for n in nodes]).sum(0) + KEPT * together(carried, b, size)
            for b, size in enumerate(sizes)
        ]
        carried = reduce_together(gradients, groups, Codec.TOPK, carried)
        for b, whole in enumerate(expected):
            assert all(torch.equal(gradients[n][b], gradients[nodes[0]][b]) for n in nodes)
            arrived = gradients[nodes[0]][b] + together(carried, b, sizes[b])
            torch.testing.assert_close(arrived.double(), whole, rtol=1e-4, atol=1e-4)


def together(carried: dict[str, Residuals], bucket: int, size: int) -> torch.Tensor:
    return torch.stack([torch.zeros(size), *(each[bucket] for each in carried.values() if bucket in each)]).sum(0)


def test_under_topk_one_member_of_each_island_sends_a_piece_and_all_get_the_same() -> None:
    nodes, who = ("a", "b", "c"), group("a", "b", "c", islands=(0, 0, 1))
    of_ab, of_c = torch.randn(5000, generator=torch.Generator().manual_seed(1)), torch.ones(5000)
    gradients = {"a": {0: of_ab.clone()}, "b": {0: of_ab.clone()}, "c": {0: of_c.clone()}}
    residuals = reduce_together(gradients, {0: who}, Codec.TOPK)
    assert all(torch.equal(gradients[n][0], gradients["a"][0]) for n in nodes)
    left = together(residuals, 0, 5000)
    torch.testing.assert_close(gradients["a"][0] + left, of_ab + of_c, rtol=1e-4, atol=1e-4)
    assert [*(who.senders(piece) for piece in range(4))] == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_what_a_member_left_out_of_pieces_that_others_send_now_is_not_forgotten() -> None:
    """A third member joins the island of a, so that a sends other pieces than before."""
    changes = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    before = reduce_together(
        {n: {0: changes.clone()} for n in ("a", "b", "c")}, {0: group("a", "b", "c", islands=(0, 0, 1))}, Codec.TOPK
    )
    after = reduce_together(
        {n: {0: torch.zeros(5000)} for n in ("a", "b", "d", "c")},
        {0: group("a", "b", "d", "c", islands=(0, 0, 0, 1))},
        Codec.TOPK,
        before,
    )
    who = group("a", "b", "d", "c", islands=(0, 0, 0, 1))
    for number in range(4):
        start, stop = who.piece(5000, number)
        if 0 not in who.senders(number):
            assert torch.equal(after["a"][0][start:stop], before["a"][0][start:stop])


def test_topk_sends_little_and_what_it_carries_is_not_changed_in_place() -> None:
    nodes = ("a", "b")
    gradients = {n: {0: torch.linspace(-1, 1, 2048)} for n in nodes}  # two pieces for each
    first = reduce_together(gradients, {0: group(*nodes)}, Codec.TOPK)
    assert int(gradients["a"][0].count_nonzero()) == 2048 * 8 // 256  # both send the same elements
    assert {n: set(residuals) for n, residuals in first.items()} == {n: {0} for n in nodes}
    before = {at: residual.clone() for at, residual in first["a"].items()}
    reduce_together({n: {0: torch.ones(2048)} for n in nodes}, {0: group(*nodes)}, Codec.TOPK, first)
    assert all(torch.equal(first["a"][at], residual) for at, residual in before.items())


def test_other_codecs_carry_nothing() -> None:
    nodes = ("a", "b")
    gradients = {n: {0: torch.randn(600, generator=torch.Generator().manual_seed(1))} for n in nodes}
    assert reduce_together(gradients, {0: group(*nodes)}, Codec.I8B256) == {"a": {}, "b": {}}


def test_a_tied_bucket_is_summed_across_stages_and_the_others_within_them() -> None:
    first, last = group("a", "b"), group("c")
    tied = Group(("a", "b", "c"), ("a", "b"), (0, 0, 1), (1, 1, 2), (0, 0, 0))
    gradients = {
        "a": {0: torch.ones(10), 9: torch.full((600,), 1.0)},
        "b": {0: torch.ones(10), 9: torch.full((600,), 10.0)},
        "c": {1: torch.ones(10), 9: torch.full((600,), 100.0)},
    }
    reduce_together(gradients, {0: first, 1: last, 9: tied})
    assert all(gradients[n][9].eq(111.0).all() for n in "abc")
    assert gradients["a"][0].eq(2.0).all()
    assert gradients["c"][1].eq(1.0).all()


def test_a_reduction_that_is_called_off_ends() -> None:
    reducer = Reducer(placed("a", {0: group("a", "b")}), lambda *_: None)
    waiting = reducer.start(STEP, {0: torch.ones(4)}, Codec.OFF, lambda *_: None)
    reducer.queue.close("b left")
    with pytest.raises(Closed, match="b left"):
        waiting.result(timeout=30)
    reducer.close()


@given(elements=st.integers(0, 100_000), members=st.integers(1, 40))
def test_shards_cover_a_bucket_in_blocks_and_nearly_evenly(elements: int, members: int) -> None:
    ranges = shards(elements, members)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == elements
    assert all(start % 256 == 0 or start == elements for start, _ in ranges)
    assert max(stop - start for start, stop in ranges) <= elements / members + 512


@given(elements=st.integers(0, 100_000), members=st.integers(1, 40))
def test_pieces_are_the_shards_cut_small_and_members_own_them_in_turn(elements: int, members: int) -> None:
    cut = pieces(elements, members)
    for member, (start, stop) in enumerate(shards(elements, members)):
        mine = [(a, b) for a, b in cut[member::members] if b > a]
        assert sum(b - a for a, b in mine) == stop - start
        assert not mine or (mine[0][0], mine[-1][1]) == (start, stop)
        assert all(before == after for (_, before), (after, _) in itertools.pairwise(mine))
    assert all(b - a <= PIECE and (a % 256 == 0 or a == elements) for a, b in cut)


def test_buckets_are_sent_from_the_last_layer_to_the_first_and_tied_ones_with_their_first_layer() -> None:
    specs = [BucketSpec(index, layers, ()) for index, layers in enumerate([(0,), (1,), (2,), (0, 2), (1, 2)])]
    assert sending_order(specs) == [2, 1, 4, 0, 3]


class Streams:
    """Members' receivers and reducers, and a stream from each member to each that is read only while the receiver has room."""

    def __init__(self, nodes: tuple[str, ...], sizes: dict[int, int], room: int) -> None:
        plan = Plan(1, (Stage((0, len(sizes)), nodes, (1,) * len(nodes)),), ())
        self.held = dict.fromkeys(nodes, 0)
        self.most_held = 0
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.receivers: dict[str, Receiver] = {}
        self.reducers: dict[str, Reducer] = {}
        for node in nodes:
            placement = placement_of(plan, node, 0, [BucketSpec(index, (index,), ()) for index in sizes])
            assert placement is not None
            expect = Expectations(placement, TensorSizes(0, 0, sizes, torch.float32, torch.float32))
            self.receivers[node] = Receiver(expect, STEP - 1, lambda a, node=node: self._deliver(node, a), room)  # type: ignore[misc]
            self.reducers[node] = Reducer(placement, partial(self._send, node), partial(self._let_go, node))
        self._queues: dict[tuple[str, str], asyncio.Queue[bytes]] = {}
        for a, b in itertools.permutations(nodes, 2):
            asyncio.run_coroutine_threadsafe(self._read(a, b), self._loop)

    def close(self) -> None:
        async def end() -> None:
            readers = asyncio.all_tasks() - {asyncio.current_task()}
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for reducer in self.reducers.values():
            reducer.close()

    def _send(self, source: str, to: str, what: What, encoded: Future[Encoded]) -> None:
        for frame in frames(what.header(encoded.result()), encoded.result().data):
            asyncio.run_coroutine_threadsafe(self._queue(source, to).put(frame), self._loop).result(30)

    def _let_go(self, node: str, arrival: Arrival) -> None:
        with self._lock:
            self.held[node] -= arrival.header.total
        self.receivers[node].let_go(arrival)

    def _queue(self, source: str, to: str) -> asyncio.Queue[bytes]:
        return self._queues.setdefault((source, to), asyncio.Queue(1))

    async def _read(self, source: str, to: str) -> None:
        while True:
            frame = await self._queue(source, to).get()
            await self.receivers[to].readable(source, self.receivers[to].take(source, frame))

    def _deliver(self, node: str, arrival: Arrival) -> None:
        with self._lock:
            self.held[node] += arrival.header.total
            self.most_held = max(self.most_held, self.held[node])
        self.reducers[node].queue.put(arrival.header.step, arrival)


@pytest.mark.parametrize("codec", [pytest.param(Codec.OFF, marks=pytest.mark.soak), Codec.I8B256])
def test_a_reduction_of_any_size_and_order_takes_memory_for_a_few_pieces(
    codec: Codec,
) -> None:
    nodes, buckets = ("a", "b", "c"), 5
    sizes = dict.fromkeys(range(buckets), 30 * PIECE)
    streams = Streams(nodes, sizes, room=4 * PIECE)
    generator = torch.Generator().manual_seed(1)
    gradients = {n: {b: torch.randn(size, generator=generator) for b, size in sizes.items()} for n in nodes}
    sums = {b: sum((gradients[n][b] for n in nodes[1:]), gradients["a"][b].clone()) for b in sizes}
    orders = {"a": [4, 3, 2, 1, 0], "b": [0, 1, 2, 3, 4], "c": [2, 4, 0, 1, 3]}

    def run(node: str) -> int:
        reducer = streams.reducers[node]

        def reduce() -> None:
            mine = {b: gradients[node][b] for b in reversed(sizes)}
            reducer.reduce(STEP, mine, codec, lambda *_: None)

        for bucket in orders[node]:
            reducer.queue.put(STEP, Final(bucket))
        if node == "b":  # torch can watch one thread at a time
            return most_allocated(reduce)
        reduce()
        return 0

    try:
        with ThreadPoolExecutor(len(nodes)) as pool:
            taken = [done.result(timeout=30) for done in [pool.submit(run, node) for node in nodes]]
    finally:
        streams.close()
    if codec is Codec.OFF:
        assert all(torch.equal(gradients[n][b], sums[b]) for n in nodes for b in sizes)
    assert all(torch.equal(gradients[n][b], gradients["a"][b]) for n in nodes for b in sizes)
    piece_bytes = 4 * PIECE
    assert max(taken) <= 2 * piece_bytes
    assert streams.most_held <= (len(nodes) - 1) * 2 * piece_bytes
    assert not any(streams.held.values())
