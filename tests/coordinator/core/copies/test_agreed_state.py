"""What the log says of the state in a snapshot: `core/copies/agreed_state.py`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from blake3 import blake3

from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LEASE, World, fresh_state, prepared, refusal_of, training

STATE = {bucket: blake3(bytes([bucket])).digest() for bucket in range(4)}
HEX = tuple(digest.hex() for digest in STATE.values())
FIRST, LAST = (0, 1), (2, 3)


def told(buckets: tuple[int, ...], state: Mapping[int, bytes] = STATE) -> list[wire.BucketState]:
    return [wire.BucketState(bucket=bucket, digest=state[bucket]) for bucket in buckets]


def whole(buckets: tuple[int, ...]) -> bytes:
    return blake3(b"".join(STATE[bucket] for bucket in buckets)).digest()


def vote(world: World, **states: list[wire.BucketState]) -> None:
    """a and b train the first half of the layers, c the second."""
    for node, buckets in (("a", FIRST), ("b", FIRST), ("c", LAST)):
        world.vote(node, state_digest=whole(buckets), states=states.get(node, []))


def with_a_checkpoint_of_step_2() -> World:
    world = training("a", "b", "c", train={"steps": 10})
    world.step()
    world.step()
    return world


def agreed(world: World) -> list[tuple[int, tuple[str, ...]]]:
    return [(event.step, event.digests) for event in world.events(ev.StateAgreed)]


def test_the_votes_after_a_checkpoint_say_what_state_it_should_hold() -> None:
    world = with_a_checkpoint_of_step_2()
    world.save()
    vote(world, a=told(FIRST), c=told(LAST))
    assert agreed(world) == [(2, HEX)]
    world.lose("c")
    assert world.last_to("a", "assignment").snapshot.states == told((*FIRST, *LAST))
    assert world.refolded().copies.digests(2) == HEX


def test_without_a_snapshot_nothing_is_logged() -> None:
    world = training("a", "b", "c", train={"steps": 10})
    world.step()
    vote(world, a=told(FIRST), c=told(LAST))
    assert agreed(world) == []


@pytest.mark.parametrize(
    "lie",
    [
        told(FIRST, STATE | {1: bytes(32)}),
        told((0,)),
        told((*FIRST, *LAST)),
        told((0, 2), STATE | {2: STATE[1]}),
    ],
)
def test_digests_that_do_not_make_up_the_agreed_digest_do_not_count(lie: list[wire.BucketState]) -> None:
    world = with_a_checkpoint_of_step_2()
    vote(world, a=lie, b=told(FIRST), c=told(LAST))
    assert agreed(world) == [(2, HEX)]


@pytest.mark.parametrize(
    "impossible",
    [
        [*told(FIRST), wire.BucketState(bucket=99, digest=bytes(32))],
        told((0, 0, 1)),
        [wire.BucketState(bucket=0, digest=STATE[0] + STATE[1])],
        [wire.BucketState(bucket=0, digest=STATE[0] + STATE[1][:8]), wire.BucketState(bucket=1, digest=STATE[1][8:])],
    ],
)
def test_impossible_digests_are_refused_though_they_make_up_the_agreed_digest(
    impossible: list[wire.BucketState],
) -> None:
    world = with_a_checkpoint_of_step_2()
    stream = world.streams["a"]
    world.vote("a", state_digest=whole(FIRST), states=impossible)
    assert "states" in refusal_of(world, stream).sentence
    assert agreed(world) == []


@pytest.mark.parametrize("as_bucket", [4, 5])
def test_for_buckets_that_stages_share_the_digest_of_most_counts(as_bucket: int) -> None:
    world = World(fresh_state(cluster={"nodes": 3}, train={"steps": 10}))
    for node in "abc":
        world.prepare(node, prepared(buckets=6))
        world.report_links(node)
    world.wait(LEASE, beating="abc")
    world.settle()
    world.step()
    world.step()
    shared = STATE[0]

    def says(node: str, own: tuple[int, ...], bucket: int) -> None:
        digest = blake3(b"".join(STATE[layer] for layer in own) + shared).digest()
        world.vote(node, state_digest=digest, states=told((*own, bucket), STATE | {bucket: shared}))

    says("a", FIRST, as_bucket)
    says("b", FIRST, 4)
    says("c", LAST, 4)
    assert [list(digests[4:]) for _, digests in agreed(world)] == [[shared.hex(), ""]]


def test_what_nobody_says_stays_unknown() -> None:
    world = with_a_checkpoint_of_step_2()
    vote(world, c=told(LAST))
    assert agreed(world) == [(2, ("", "", *HEX[2:]))]


def test_at_the_end_they_say_it_when_they_have_applied_the_last_step() -> None:
    world = training("a", "b", "c", train={"steps": 1})
    world.step()
    for node, buckets in (("a", FIRST), ("b", FIRST), ("c", LAST)):
        applied = wire.Applied(generation=1, step=1, state_digest=whole(buckets), states=told(buckets))
        world.hear(node, applied=applied)
    world.evaluate()
    world.save()
    assert agreed(world) == [(1, HEX)]
    assert world.exit_code == 0


def test_a_plan_that_begins_says_it_too() -> None:
    world = with_a_checkpoint_of_step_2()
    world.fail_step("a", wire.INTERNAL)
    for node, buckets in (("a", FIRST), ("b", FIRST), ("c", LAST)):
        world.plan_ready(node, states=told(buckets))
    assert agreed(world) == [(2, HEX)]


def test_going_back_forgets_agreed_digests_of_later_steps() -> None:
    world = with_a_checkpoint_of_step_2()
    vote(world, a=told(FIRST), c=told(LAST))
    world.lose("c")
    world.join("d")
    assert world.state.ledger.training.step == 0
    assert world.state.ledger.copies.agreed == {}


ZEROS = STATE | dict.fromkeys(range(4), bytes(32))


@pytest.mark.parametrize("wrong", [{"a": ZEROS, "b": ZEROS}, {"b": STATE | {2: bytes(32)}}])
def test_nobody_trains_on_another_state_than_the_snapshot_has(wrong: Mapping[str, Mapping[int, bytes]]) -> None:
    world = with_a_checkpoint_of_step_2()
    world.save()
    vote(world, a=told(FIRST), c=told(LAST))
    world.lose("c")
    generation = world.state.ledger.training.generation
    of_stage = {node: range(*world.plan_in_force.stages[stage].layers) for stage, node in enumerate("ab")}

    def begin(state: Mapping[str, Mapping[int, bytes]]) -> None:
        for node, buckets in of_stage.items():
            world.plan_ready(node, states=told(tuple(buckets), state.get(node, STATE)))

    begin(wrong)
    assert world.state.ledger.training.generation == generation + 1, "the plan comes again"
    setbacks = [event.reason for event in world.events(ev.Suspected)]
    assert [reason.partition(" than ")[2] for reason in setbacks] == ["the snapshot"] * len(wrong)
    begin({})
    assert isinstance(world.state.phase, Stepping)
    assert world.state.phase.step == 3
