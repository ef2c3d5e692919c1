"""How many keys from one address may be members of an open run: `core/members/membership.py`."""

from __future__ import annotations

import pytest

from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import World, fresh_state
from tests.coordinator.strangers import open_run


def told(world: World, node: str, seen: str, key: str = "") -> wire.Refusal | None:
    """What the node is told that says Hello from there, with this key or its own; None: welcome."""
    world.belong_together(node, key=key or f"the key of {node}")
    world.greet(node, seen=seen)
    last = world.heard_by(node)[-1]
    return last.refusal if last.WhichOneof("message") == "refusal" else None


@pytest.mark.parametrize(
    ("one", "same", "another"),
    [("192.0.2.1", "192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1")],
)
def test_as_many_keys_as_the_run_allows_are_members_from_one_address(one: str, same: str, another: str) -> None:
    world = World(open_run(2, trust={"keys_per_address": 2}))
    assert told(world, "a", one) is None
    assert told(world, "b", one) is None
    refusal = told(world, "c", same)
    assert refusal is not None
    assert refusal.reason == wire.FULL
    assert "2 keys from" in refusal.sentence
    assert "[trust] keys_per_address" in refusal.sentence
    assert told(world, "d", another) is None
    world.lose("a")
    assert told(world, "c", same) is None


def test_a_machine_with_many_devices_counts_once_and_a_member_may_come_again() -> None:
    world = World(open_run(2, trust={"keys_per_address": 1}))
    assert told(world, "a", "192.0.2.1") is None
    assert told(world, "a-2", "192.0.2.1", key="the key of a") is None
    assert told(world, "a", "192.0.2.1") is None
    assert told(world, "b", "192.0.2.1") is not None


@pytest.mark.parametrize("seen", ["127.0.0.1", "::1", ""])
def test_nodes_on_the_coordinators_own_machine_do_not_count(seen: str) -> None:
    world = World(open_run(2, trust={"keys_per_address": 1}))
    assert told(world, "a", seen) is None
    assert told(world, "b", seen) is None


def test_people_who_know_each_other_may_be_as_many_as_they_like() -> None:
    world = World(fresh_state(trust={"keys_per_address": 1}))
    assert told(world, "a", "192.0.2.1") is None
    assert told(world, "b", "192.0.2.1") is None
