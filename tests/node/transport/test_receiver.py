"""A node accepts only what the plan has a peer send, and each tensor once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from dtfm.kernels.codec import Codec, encoded_bytes
from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.placement import placement_of, shards
from dtfm.node.transport.frame_validation import Expectations, TensorSizes, validate
from dtfm.node.transport.receiver import Arrival, Receiver
from dtfm.protos.frame import CHUNK_BYTES, FrameError, FrameProblem, Header, Kind, frames
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from dtfm.scheduler.model.rounds import Rounds

# Micro-batches 0 and 2 go from a1 to me, 1 and 3 from a2 to other; `me` and `other` are a replica group.
PLAN = from_routes(
    5,
    [Stage((0, 1), ("a1", "a2"), ()), Stage((1, 2), ("me", "other"), ()), Stage((2, 3), ("z",), ())],
    [(("a1", "me", "z"), 2), (("a2", "other", "z"), 2)],
)
ELEMENTS = CHUNK_BYTES // 4 + 100  # two frames
BUCKET = 1000
APPLIED = 7


def expectations(elements: int = ELEMENTS) -> Expectations:
    placement = placement_of(PLAN, "me", 2, [BucketSpec(1, (1,), ())])
    assert placement is not None
    return Expectations(placement, TensorSizes(elements, elements, {1: BUCKET}, torch.float32, torch.float32))


class Fixture:
    def __init__(self, elements: int = ELEMENTS) -> None:
        self.arrived: list[Arrival] = []
        self.receiver = Receiver(expectations(elements), APPLIED, self.arrived.append)

    def take(self, source: str, header: Header) -> None:
        for frame in frames(header, memoryview(bytes(header.total))):
            self.receiver.take(source, frame)

    def problem(self, source: str, header: Header) -> FrameProblem:
        before = len(self.arrived)
        with pytest.raises(FrameError) as caught:
            self.take(source, header)
        assert len(self.arrived) == before
        return caught.value.problem


@pytest.fixture
def at() -> Fixture:
    return Fixture()


def header(
    kind: Kind = Kind.ACTIVATION, *, elements: int = ELEMENTS, index: int = 0, part: int = 0, step: int = 8
) -> Header:
    return Header(kind, 0, 1, 5, step, index, part, elements, elements * 4)


def test_what_the_plan_has_peers_send_arrives_whole(at: Fixture) -> None:
    mine = shards(BUCKET, 2)[0][1] - shards(BUCKET, 2)[0][0]
    at.take("a1", header(index=0))
    at.take("a1", header(index=2, step=9))  # a1 has seen the commit of 8 before us
    at.take("z", header(Kind.GRADIENT, index=0))
    at.take("a1", header(Kind.EVALUATION, index=0, step=7))
    at.take("other", header(Kind.REDUCE, index=1, part=0, elements=mine))
    at.take("other", header(Kind.GATHER, index=1, part=1, elements=BUCKET - mine))
    assert [(a.source, a.header.kind, len(a.encoded)) for a in at.arrived] == [
        ("a1", Kind.ACTIVATION, ELEMENTS * 4),
        ("a1", Kind.ACTIVATION, ELEMENTS * 4),
        ("z", Kind.GRADIENT, ELEMENTS * 4),
        ("a1", Kind.EVALUATION, ELEMENTS * 4),
        ("other", Kind.REDUCE, mine * 4),
        ("other", Kind.GATHER, (BUCKET - mine) * 4),
    ]


@pytest.mark.parametrize(
    ("source", "wrong", "problem"),
    [
        ("a1", replace(header(), generation=4), FrameProblem.STALE),
        ("a1", replace(header(), generation=6), FrameProblem.UNKNOWN_GENERATION),
        ("a1", header(step=7), FrameProblem.STALE),
        ("a1", header(step=10), FrameProblem.UNEXPECTED),
        ("a1", header(Kind.EVALUATION, step=6), FrameProblem.STALE),
        ("a2", header(), FrameProblem.UNEXPECTED),
        ("stranger", header(), FrameProblem.UNEXPECTED),
        ("z", header(), FrameProblem.UNEXPECTED),
        ("a1", header(Kind.GRADIENT), FrameProblem.UNEXPECTED),
        ("a1", header(index=1), FrameProblem.UNEXPECTED),
        ("a1", header(elements=ELEMENTS + 1), FrameProblem.UNEXPECTED),
        ("a1", replace(header(), dtype=2), FrameProblem.UNEXPECTED),
        ("a1", replace(header(), codec=99), FrameProblem.MALFORMED),
        ("a1", replace(header(), total=ELEMENTS * 4 - 4), FrameProblem.MALFORMED),
        ("other", header(Kind.REDUCE, index=1, part=1, elements=488), FrameProblem.UNEXPECTED),
        ("me", header(Kind.GATHER, index=1, part=0, elements=512), FrameProblem.UNEXPECTED),
        ("other", header(Kind.REDUCE, index=1, part=7, elements=512), FrameProblem.UNEXPECTED),
        ("other", header(Kind.REDUCE, index=3, part=0, elements=512), FrameProblem.UNEXPECTED),
        ("a1", header(Kind.STATE), FrameProblem.UNEXPECTED),
    ],
)
def test_everything_else_is_refused_by_name(at: Fixture, source: str, wrong: Header, problem: FrameProblem) -> None:
    assert at.problem(source, wrong) is problem
    at.take("a1", header())  # and the sound tensor still gets in
    assert len(at.arrived) == 1


def test_a_tensor_sent_twice_counts_once(at: Fixture) -> None:
    at.take("a1", header())
    assert at.problem("a1", header()) is FrameProblem.DUPLICATE


def test_a_tensor_sent_again_with_another_codec_is_a_duplicate(at: Fixture) -> None:
    at.take("a1", header())
    other = replace(header(), codec=1, total=ELEMENTS * 2)
    assert at.problem("a1", other) is FrameProblem.DUPLICATE


def under(codec: Codec, plain: Header) -> Header:
    return replace(plain, codec=codec, total=encoded_bytes(codec, plain.elements, torch.float32))


under_topk, under_top64 = partial(under, Codec.TOPK), partial(under, Codec.TOP64)
each_sparse = pytest.mark.parametrize("sparsely", [under_topk, under_top64], ids=["topk", "top64"])


@each_sparse
@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.EVALUATION, Kind.GRADIENT, Kind.REDUCE, Kind.GATHER])
def test_sparse_codecs_are_only_for_exchanges(at: Fixture, kind: Kind, sparsely: Callable[[Header], Header]) -> None:
    source = {Kind.GRADIENT: "z", Kind.REDUCE: "other", Kind.GATHER: "other"}.get(kind, "a1")
    at_bucket = {
        Kind.REDUCE: {"index": 1, "elements": 512},
        Kind.GATHER: {"index": 1, "part": 1, "elements": BUCKET - 512},
    }
    assert at.problem(source, sparsely(header(kind, **at_bucket.get(kind, {})))) is FrameProblem.UNEXPECTED


def exchange(*, sparse: bool) -> Expectations:
    """Of step 8, by two islands: of "me" and "mine", and of "a" and "b"."""
    islands = [Stage((0, 1), names, (1, 1), island=n) for n, names in enumerate((("me", "mine"), ("a", "b")))]
    placement = placement_of(Plan(5, tuple(islands), (), rounds=Rounds(0, 4, 1)), "me", 2, [BucketSpec(0, (0,), ())])
    assert placement is not None
    return Expectations(
        placement, TensorSizes(ELEMENTS, ELEMENTS, {0: BUCKET}, torch.float32, torch.float32), sparse=sparse
    )


def accepted(expect: Expectations, made: Callable[[Header], Header], kind: Kind) -> set[tuple[str, int]]:
    """Who may send this node which piece."""
    sent = set[tuple[str, int]]()
    for part, source in itertools.product(range(4), ("mine", "a", "b")):
        start, stop = expect.placement.exchange_groups[0].piece(BUCKET, part)
        with contextlib.suppress(FrameError):
            validate(expect, APPLIED, source, made(header(kind, part=part, elements=stop - start)))
            sent.add((source, part))
    return sent


@pytest.mark.parametrize(
    "made",
    [under_topk, under_top64, lambda plain: plain],
    ids=["topk", "top64", "or where it cannot be encoded, as it is"],
)
def test_in_a_sparse_exchange_one_of_each_island_sends_a_piece_to_all(made: Callable[[Header], Header]) -> None:
    by_turns = {("a", 0), ("b", 1), ("mine", 1), ("a", 2), ("b", 3), ("mine", 3)}
    assert accepted(exchange(sparse=True), made, Kind.REDUCE) == by_turns
    assert not accepted(exchange(sparse=True), made, Kind.GATHER)


@each_sparse
def test_in_another_exchange_each_piece_has_an_owner_and_no_codec_is_sparse(
    sparsely: Callable[[Header], Header],
) -> None:
    """Of the four pieces the first is "me"'s."""
    assert accepted(exchange(sparse=False), lambda plain: plain, Kind.REDUCE) == {("mine", 0), ("a", 0), ("b", 0)}
    assert accepted(exchange(sparse=False), lambda plain: plain, Kind.GATHER) == {("mine", 1), ("a", 2), ("b", 3)}
    assert not accepted(exchange(sparse=False), sparsely, Kind.REDUCE)


@each_sparse
def test_between_exchanges_no_codec_is_sparse_either(sparsely: Callable[[Header], Header]) -> None:
    """Step 9 trains. "mine" sends its gradients of the piece that is "me"'s."""
    expect = exchange(sparse=True)
    start, stop = expect.placement.groups[0].piece(BUCKET, 0)
    plain = header(Kind.REDUCE, elements=stop - start, step=9)
    validate(expect, APPLIED + 1, "mine", plain)
    with pytest.raises(FrameError):
        validate(expect, APPLIED + 1, "mine", sparsely(plain))


def test_only_the_owner_of_a_matrix_sends_its_update_in_16_bits_and_under_no_codec() -> None:
    """Of the matrices with 300 and 600 elements "me" owns the larger one, as the first member of its group."""
    plain = expectations()
    expect = replace(plain, sizes=replace(plain.sizes, matrices={1: (300, 600)}))
    update = Header(Kind.ORTHOGONAL, 0, 3, 5, 8, 1, 0, 300, 600)
    validate(expect, APPLIED, "other", update)
    wrong = {
        "another sender": ("a1", update),
        "my own": ("other", replace(update, part=1, elements=600, total=1200)),
        "no such piece": ("other", replace(update, part=2)),
        "no such bucket": ("other", replace(update, index=0)),
        "32 bits": ("other", replace(update, dtype=1, total=1200)),
        "another size": ("other", replace(update, elements=299, total=598)),
        "a codec": ("other", replace(update, codec=Codec.RAW16)),
    }
    for source, header_of in wrong.values():
        with pytest.raises(FrameError) as caught:
            validate(expect, APPLIED, source, header_of)
        assert caught.value.problem is FrameProblem.UNEXPECTED
    with pytest.raises(FrameError):  # in a run without Muon
        validate(plain, APPLIED, "other", update)


def test_a_tensor_cannot_change_its_codec_half_way(at: Fixture) -> None:
    at.receiver.take("a1", next(iter(frames(header(), memoryview(bytes(ELEMENTS * 4))))))
    other = replace(header(), codec=1, total=ELEMENTS * 2)
    assert at.problem("a1", other) is FrameProblem.UNEXPECTED


def test_frames_of_a_tensor_in_the_wrong_order_or_twice_are_refused(at: Fixture) -> None:
    first, second = frames(header(), memoryview(bytes(ELEMENTS * 4)))
    with pytest.raises(FrameError, match="UNEXPECTED"):
        at.receiver.take("a1", second)
    at.receiver.take("a1", first)
    with pytest.raises(FrameError, match="DUPLICATE"):
        at.receiver.take("a1", first)
    at.receiver.take("a1", second)
    assert len(at.arrived) == 1


def test_after_a_step_is_applied_its_tensors_are_stale_and_the_step_after_next_may_come(at: Fixture) -> None:
    at.receiver.take("a1", next(iter(frames(header(), memoryview(bytes(ELEMENTS * 4))))))
    at.receiver.advance(8)
    assert at.problem("a1", header(step=8)) is FrameProblem.STALE
    at.take("a1", header(step=9))
    at.take("a1", header(step=10))
    assert [a.header.step for a in at.arrived] == [9, 10]


def test_what_replicas_exchange_is_read_while_there_is_room_and_activations_always() -> None:
    mine = shards(BUCKET, 2)[0][1]
    addend, theirs = (
        header(Kind.REDUCE, index=1, part=0, elements=mine),
        header(Kind.GATHER, index=1, part=1, elements=BUCKET - mine),
    )

    async def scenario() -> None:
        arrived: list[Arrival] = []
        receiver = Receiver(expectations(), APPLIED, arrived.append, room=addend.total)

        def take(what: Header, source: str = "other") -> asyncio.Task[None]:
            (frame,) = frames(what, memoryview(bytes(what.total)))
            return asyncio.create_task(receiver.readable(source, receiver.take(source, frame)))

        async def goes_on(reading: asyncio.Task[None]) -> bool:
            await asyncio.sleep(0)
            return reading.done()

        assert await goes_on(take(addend))
        reading = take(theirs)
        assert not await goes_on(reading)
        await receiver.readable("other", Kind.ACTIVATION)
        receiver.let_go(arrived[0])
        await reading
        reading = take(replace(addend, step=9))  # it is a step ahead
        assert not await goes_on(reading)
        receiver.let_go(arrived[1])
        await reading
        reading = take(replace(theirs, step=9))
        assert not await goes_on(reading)
        receiver.advance(8)
        assert not await goes_on(reading)
        receiver.advance(9)
        await reading
        for what in (replace(addend, step=10), replace(theirs, step=10)):
            reading = take(what)
        assert not await goes_on(reading)
        receiver.close()
        await reading

    asyncio.run(scenario())


def test_how_fast_a_tensor_comes_is_known_before_it_is_whole() -> None:
    coming = header(elements=3 * CHUNK_BYTES // 4)
    at = Fixture(coming.elements)
    first, second, third = frames(coming, memoryview(bytes(coming.total)))
    assert at.receiver.paces_so_far() == []
    at.receiver.take("a1", first)
    at.receiver.take("a1", second)
    (pace,) = at.receiver.paces_so_far()
    assert (pace.source, pace.bytes) == ("a1", CHUNK_BYTES)
    later = at.receiver.paces_so_far()[0].seconds
    assert later >= pace.seconds > 0  # it goes on while nothing comes
    at.receiver.take("a1", third)
    (so_far,), (whole,) = at.receiver.paces_so_far(), at.receiver.take_paces()
    assert so_far == whole
    assert whole.bytes == 2 * CHUNK_BYTES
    assert at.receiver.paces_so_far() == []
