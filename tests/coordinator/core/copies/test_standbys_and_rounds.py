"""Standbys after rounds. Any island may go on alone after them."""

from __future__ import annotations

from typing import Any

import pytest

from dtfm.coordinator.core.timeouts import TOGETHER_LEASES
from dtfm.coordinator.core.transition import TimePassed
from dtfm.coordinator.log import events as ev
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, numbered
from tests.coordinator.answers import links
from tests.coordinator.script import LAYERS, LEASE, World, fresh_state, two_stages
from tests.coordinator.standbys import caught_up

ISLANDS = [0, 1]
"""The number of the only island: 1 if rounds have ended and island 1 goes on."""


def in_stages(*nodes: str) -> Plan:
    cuts = (0, LAYERS // 2, LAYERS)
    stages = [Stage((cuts[n], cuts[n + 1]), (node,), ()) for n, node in enumerate(nodes)]
    return from_routes(0, stages, [(nodes, 4)])


def trained(island: int, **changes: dict[str, Any]) -> World:
    """Nodes a and b train; c has not come yet."""
    run: dict[str, Any] = {
        "train": {"rounds": 0, "steps": 500, "evaluate_every": 0},
        "cluster": {"nodes": 2},
        **changes,
    }
    world = World(fresh_state(**run), lambda nodes: numbered(two_stages(nodes), island))
    world.join("a", "b")
    world.settle()
    world.automatic_standbys = False
    world.stick_to_plan()
    return world


@pytest.mark.parametrize("island", ISLANDS)
def test_one_takes_over_whatever_the_number_of_the_island_is(island: int) -> None:
    world = trained(island)
    world.join("c")
    world.step()
    caught_up(world, "c")
    world.planner = lambda _: numbered(in_stages("c", "b"), island)
    world.lose("a")
    world.wait(2 * LEASE, beating="bc")
    assert [event.node for event in world.events(ev.StandbyPromoted)] == ["c"]
    assert not world.events(ev.RolledBack)


@pytest.mark.parametrize("island", ISLANDS)
def test_without_rounds_a_link_must_carry_each_steps_gradients_whatever_the_codec_of_exchanges(island: int) -> None:
    world = trained(island, network={"exchange": "topk"})
    world.now += 1.0
    world.step()  # of a second, with 2 MiB of gradients for each stage
    world.prepare("c")
    measured = links("c", ["a", "b"])
    for link in measured.links.links:
        link.bandwidth = 1 << 20
    world.hear("c", measured)
    world.now += TOGETHER_LEASES * LEASE
    world.feed(TimePassed())
    assert "standby" not in world.kinds_to("c")
