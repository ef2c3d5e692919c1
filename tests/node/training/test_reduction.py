"""A replica group's gradients become their sum, the same bits on every member."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtfm.kernels.codec import DTYPE_NUMBERS, Codec, Encoded
from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.placement import Group, group_of, share_of
from dtfm.node.training.reduction import Final, Residuals, reduce_gradients, sending_order
from dtfm.node.transport import frame_validation
from dtfm.node.transport.frame_validation import Expectations, pieces, shards
from dtfm.node.transport.receiver import Arrival, Inbox
from dtfm.node.transport.topic_queue import Closed, Mailbox
from dtfm.protos.frame import Header, Kind, frames
from dtfm.protos.plan_pb2 import Plan
from tests.node.allocated import most_allocated

Mail = Mailbox[int, Arrival | Final]
STEP = 4
PIECE = 512


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_validation, "PIECE_ELEMENTS", PIECE)
        pieces.cache_clear()
        yield
    pieces.cache_clear()


def reduce_together(
    gradients: dict[str, dict[int, torch.Tensor]],
    groups: dict[int, Group],
    codec: Codec = Codec.OFF,
    carried: dict[str, Residuals] | None = None,
) -> dict[str, Residuals]:
    """Runs every member's reduction in a thread; what one sends is in the other's mailbox at once."""
    mail: dict[str, Mail] = {node: Mailbox() for node in gradients}

    def run(node: str) -> Residuals:
        def deliver(
            kind: Kind, to: str, bucket: int, shard: int, encoded: Encoded, elements: int, dtype: torch.dtype
        ) -> None:
            data = memoryview(bytearray(encoded.data))
            header = Header(kind, encoded.codec, DTYPE_NUMBERS[dtype], 1, STEP, bucket, shard, elements, len(data))
            mail[to].put(STEP, Arrival(node, header, data))

        for bucket in gradients[node]:
            mail[node].put(STEP, Final(bucket))
        mine = {b: groups[b] for b in gradients[node]}
        before = carried[node] if carried is not None else {}
        return reduce_gradients(node, STEP, gradients[node], mine, mail[node], deliver, codec, before, lambda *_: None)

    with ThreadPoolExecutor(len(gradients)) as pool:
        running = {node: pool.submit(run, node) for node in gradients}
        return {node: done.result(timeout=30) for node, done in running.items()}


@settings(max_examples=30, deadline=None)
@given(members=st.integers(1, 5), sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_all_members_end_with_the_sum_bit_for_bit(members: int, sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes = [f"n{i}" for i in range(members)]
    gradients = {n: {b: torch.randn(size, generator=generator) for b, size in enumerate(sizes)} for n in nodes}
    sums = {b: torch.stack([gradients[n][b].double() for n in nodes]).sum(0) for b in range(len(sizes))}
    group = Group(tuple(nodes), tuple(nodes))
    reduce_together(gradients, dict.fromkeys(range(len(sizes)), group))
    for b, expected in sums.items():
        torch.testing.assert_close(gradients[nodes[0]][b].double(), expected, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(gradients[n][b], gradients[nodes[0]][b]) for n in nodes)


@pytest.mark.parametrize("codec", [Codec.RAW16, Codec.I8B256])
def test_under_a_lossy_codec_members_still_hold_the_same_bits_near_the_sum(codec: Codec) -> None:
    nodes = ("a", "b", "c")
    generator = torch.Generator().manual_seed(1)
    gradients = {n: {0: torch.randn(5000, generator=generator)} for n in nodes}
    expected = torch.stack([gradients[n][0] for n in nodes]).sum(0)
    reduce_together(gradients, {0: Group(nodes, nodes)}, codec)
    assert all(torch.equal(gradients[n][0], gradients["a"][0]) for n in nodes)
    assert not torch.equal(gradients["a"][0], expected)
    torch.testing.assert_close(gradients["a"][0], expected, rtol=0, atol=0.12)


@settings(max_examples=20, deadline=None)
@given(
    members=st.integers(2, 4),
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=2),
    steps=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_what_topk_leaves_out_is_carried_until_it_arrives(
    members: int, sizes: list[int], steps: int, dtype: torch.dtype, seed: int
) -> None:
    """Over any number of steps, what all arrived at and what is still carried add up to what all put in."""
    generator = torch.Generator().manual_seed(seed)
    nodes = [f"n{i}" for i in range(members)]
    groups = dict.fromkeys(range(len(sizes)), Group(tuple(nodes), tuple(nodes)))
    put_in = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    arrived = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    carried: dict[str, Residuals] = {node: {} for node in nodes}
    for _ in range(steps):
        gradients = {
            n: {b: torch.randn(size, generator=generator).to(dtype) for b, size in enumerate(sizes)} for n in nodes
        }
        for b, total in enumerate(put_in):
            total += sum(gradients[n][b].double() for n in nodes)
        carried = reduce_together(gradients, groups, Codec.TOPK, carried)
        for b, total in enumerate(arrived):
            total += gradients[nodes[0]][b]
            assert all(torch.equal(gradients[n][b], gradients[nodes[0]][b]) for n in nodes)
    for residuals in carried.values():
        for (b, piece), residual in residuals.items():
            start, stop = pieces(sizes[b], members)[piece]
            arrived[b][start:stop] += residual
    for b, expected in enumerate(put_in):
        torch.testing.assert_close(arrived[b], expected, rtol=1e-4, atol=1e-4)


def test_topk_sends_little_and_what_it_carries_is_not_changed_in_place() -> None:
    nodes = ("a", "b")
    gradients = {n: {0: torch.linspace(-1, 1, 2048)} for n in nodes}  # two pieces for each
    first = reduce_together(gradients, {0: Group(nodes, nodes)}, Codec.TOPK)
    assert int(gradients["a"][0].count_nonzero()) == 2048 * 8 // 256
    assert {n: set(residuals) for n, residuals in first.items()} == {n: {(0, 0), (0, 1), (0, 2), (0, 3)} for n in nodes}
    before = {at: residual.clone() for at, residual in first["a"].items()}
    reduce_together({n: {0: torch.ones(2048)} for n in nodes}, {0: Group(nodes, nodes)}, Codec.TOPK, first)
    assert all(torch.equal(first["a"][at], residual) for at, residual in before.items())


def test_other_codecs_carry_nothing() -> None:
    nodes = ("a", "b")
    gradients = {n: {0: torch.randn(600, generator=torch.Generator().manual_seed(1))} for n in nodes}
    assert reduce_together(gradients, {0: Group(nodes, nodes)}, Codec.I8B256) == {"a": {}, "b": {}}


def test_a_tied_bucket_is_summed_across_stages_and_the_others_within_them() -> None:
    first, last = Group(("a", "b"), ("a", "b")), Group(("c",), ("c",))
    tied = Group(("a", "b", "c"), ("a", "b"))
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
    mail: Mail = Mailbox()
    groups = {0: Group(("a", "b"), ("a", "b"))}
    with ThreadPoolExecutor(1) as pool:
        one = {0: torch.ones(4)}
        waiting = pool.submit(
            reduce_gradients, "a", STEP, one, groups, mail, lambda *_: None, Codec.OFF, {}, lambda *_: None
        )
        mail.close("b left")
        with pytest.raises(Closed, match="b left"):
            waiting.result(timeout=30)


@given(elements=st.integers(0, 100_000), members=st.integers(1, 40))
def test_shards_cover_a_bucket_in_blocks_and_nearly_evenly(elements: int, members: int) -> None:
    ranges = shards(elements, members)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == elements
    assert all(start % 256 == 0 or start == elements for start, _ in ranges)
    assert max(stop - start for start, stop in ranges) <= elements / members + 512


@given(elements=st.integers(0, 100_000), members=st.integers(1, 40))
def test_pieces_are_the_shards_cut_small_and_each_members_own_is_counted_round(elements: int, members: int) -> None:
    cut = pieces(elements, members)
    for member, (start, stop) in enumerate(shards(elements, members)):
        mine = [(a, b) for a, b in cut[member::members] if b > a]
        assert sum(b - a for a, b in mine) == stop - start
        assert not mine or (mine[0][0], mine[-1][1]) == (start, stop)
        assert all(before == after for (_, before), (after, _) in itertools.pairwise(mine))
    assert all(b - a <= PIECE and (a % 256 == 0 or a == elements) for a, b in cut)


def test_shares_are_sent_from_the_last_layer_to_the_first_and_what_several_use_when_the_first_of_them_is_done() -> None:
    specs = [BucketSpec(index, layers, ()) for index, layers in enumerate([(0,), (1,), (2,), (0, 2), (1, 2)])]
    assert sending_order(specs) == [2, 1, 4, 0, 3]


class Streams:
    """Members' inboxes, and a stream from each to each that is read only while the inbox has room."""

    def __init__(self, nodes: tuple[str, ...], sizes: dict[int, int], room: int) -> None:
        stage = Plan.Stage(first_layer=0, past_last_layer=len(sizes), replicas=nodes)
        plan = Plan(generation=1, stages=[stage], routes=[Plan.Route(nodes=[n], micro_batches=1) for n in nodes])
        self.groups = {index: group_of(plan, [index]) for index in sizes}
        self.mail: dict[str, Mail] = {node: Mailbox() for node in nodes}
        self.held = dict.fromkeys(nodes, 0)
        self.most_held = 0
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.inboxes: dict[str, Inbox] = {}
        for node in nodes:
            share = share_of(plan, node, 0)
            assert share is not None
            expect = Expectations(share, self.groups, sizes, 0, 0, torch.float32, torch.float32)
            self.inboxes[node] = Inbox(expect, STEP - 1, lambda a, node=node: self._deliver(node, a), room)  # type: ignore[misc]
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

    def send(
        self,
        source: str,
        kind: Kind,
        to: str,
        bucket: int,
        part: int,
        encoded: Encoded,
        elements: int,
        dtype: torch.dtype,
    ) -> None:
        header = Header(kind, encoded.codec, DTYPE_NUMBERS[dtype], 1, STEP, bucket, part, elements, len(encoded.data))
        for frame in frames(header, encoded.data):
            asyncio.run_coroutine_threadsafe(self._queue(source, to).put(frame), self._loop).result(30)

    def let_go(self, node: str, arrival: Arrival) -> None:
        with self._lock:
            self.held[node] -= arrival.header.total
        self.inboxes[node].let_go(arrival)

    def _queue(self, source: str, to: str) -> asyncio.Queue[bytes]:
        return self._queues.setdefault((source, to), asyncio.Queue(1))

    async def _read(self, source: str, to: str) -> None:
        while True:
            frame = await self._queue(source, to).get()
            await self.inboxes[to].readable(source, self.inboxes[to].take(source, frame))

    def _deliver(self, node: str, arrival: Arrival) -> None:
        with self._lock:
            self.held[node] += arrival.header.total
            self.most_held = max(self.most_held, self.held[node])
        self.mail[node].put(arrival.header.step, arrival)


@pytest.mark.parametrize("codec", [Codec.OFF, Codec.I8B256])
def test_beside_the_gradients_there_are_a_few_pieces_however_much_is_reduced_and_in_whatever_order_it_gets_final(
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
        def reduce() -> None:
            mine = {b: gradients[node][b] for b in reversed(sizes)}
            reduce_gradients(
                node,
                STEP,
                mine,
                streams.groups,
                streams.mail[node],
                lambda *message: streams.send(node, *message),
                codec,
                {},
                lambda *_: None,
                lambda arrival: streams.let_go(node, arrival),
            )

        for bucket in orders[node]:
            streams.mail[node].put(STEP, Final(bucket))
        if node == "b":  # torch can look at one of them at a time
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
