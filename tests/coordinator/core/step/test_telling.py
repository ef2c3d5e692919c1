"""What members are told of the run: how far it is, how fast, and what it waits for."""

from __future__ import annotations

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.wording import without_addresses
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LONG, World, fresh_state, training


def told(world: World, node: str) -> list[wire.RunStatus]:
    return world.told.get(world.streams[node], [])


def waits(world: World, node: str) -> list[str]:
    """What the node was told that the run waits for, in order."""
    return [status.waiting for status in told(world, node)]


def test_a_node_that_joins_is_told_what_the_run_waits_for_until_it_trains() -> None:
    world = World(fresh_state(cluster={"nodes": 2}))
    world.join("a")
    world.automatic_planning = False
    world.join("b")
    world.plan()
    world.settle()
    assert waits(world, "a")[-5:] == [
        "1 of 2 nodes are ready",
        "a plan is being made",
        "plan 1 begins when these have the state of their layers: a, b",
        "plan 1 begins when these have the state of their layers: b",
        "",
    ]
    assert world.last_to("b", "welcome").status.waiting == "1 of 2 nodes are ready"


def test_who_has_no_part_in_the_plan_is_told_of_each_commit_too() -> None:
    world = training("a", "b", **LONG)
    world.stick_to_plan()
    world.join("c")
    said = len(told(world, "a")), len(told(world, "c"))
    world.now += 2.0
    world.step()
    assert len(told(world, "a")) == said[0], "its commit says so already"
    assert told(world, "c")[said[1] :] == [world.last_to("a", "commit").status]
    assert told(world, "c")[-1].seconds == world.events(ev.StepCommitted)[-1].seconds > 0


def test_a_node_that_returns_is_told_in_how_many_steps_it_took_part() -> None:
    world = training("a", "b", **LONG)
    world.step()
    world.step()
    world.lose("a")
    world.join("a")
    assert world.last_to("a", "welcome").worked_steps == 2


def test_members_are_told_why_it_waits_and_nobodys_address() -> None:
    world = training("a", "b", **LONG)
    world.step()
    world.lose("b", "failed to connect to ipv4:10.1.2.3:7000, and [2001:db8::7]:7001")
    (reason,) = {status.waiting for status in told(world, "a")[-1:]}
    assert "b left (failed to connect to ipv4:(address hidden), and (address hidden))" in reason
    assert "1 of 2 nodes are ready" in reason


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("ipv4:10.1.2.3:7000: refused", "ipv4:(address hidden): refused"),
        ("at 10.1.2.3.", "at (address hidden)."),
        ("ipv6:%5B2001:db8::7%5D:7000", "ipv6:%5B(address hidden)"),
        ("at 2001:db8::7: refused, [fe80::1%eth0]:7", "at (address hidden): refused, (address hidden)"),
        ("step 3 at 12:47:07: 2.5 of 1.2.3", "step 3 at 12:47:07: 2.5 of 1.2.3"),
    ],
)
def test_addresses_are_hidden_and_nothing_else_is(said: str, shown: str) -> None:
    assert without_addresses(said) == shown
