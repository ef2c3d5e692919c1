"""What the log says of the state in a snapshot: `core/safekeeping/agreed_state.py`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from blake3 import blake3

from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import World, training

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
    assert world.refolded().agreed == {2: HEX}


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
        [*told(FIRST), wire.BucketState(bucket=99, digest=bytes(32))],
        told((0, 0, 1)),
    ],
)
def test_digests_that_do_not_make_up_what_all_agree_on_do_not_count(lie: list[wire.BucketState]) -> None:
    world = with_a_checkpoint_of_step_2()
    vote(world, a=lie, b=told(FIRST), c=told(LAST))
    assert agreed(world) == [(2, HEX)]


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


def test_going_back_forgets_what_was_agreed_of_later_steps() -> None:
    world = with_a_checkpoint_of_step_2()
    vote(world, a=told(FIRST), c=told(LAST))
    world.lose("c")
    world.join("d")
    assert world.state.ledger.step == 0
    assert world.state.ledger.agreed == {}
