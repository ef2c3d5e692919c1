"""Disks too small for the snapshots and checkpoints of the run are named before step 1: `core/copies/disks.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dtfm.coordinator.core.copies.disks import ROOM_BYTES, SNAPSHOTS
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.log import events as ev
from tests.coordinator.script import LAYERS, World, fresh_state, prepared

WEIGHTS = LAYERS << 20
"""Bytes of the model's weights."""


def begun(
    disks: dict[str, int],
    own_disk: float = math.inf,
    *,
    one_machine: bool = False,
    checkpoint: dict[str, Any] | None = None,
) -> World:
    """Step 1 is under way. ``disks``: by node, the free bytes. ``own_disk``: the free bytes on the coordinator's disk."""
    state = fresh_state(cluster={"nodes": len(disks)}, checkpoint=checkpoint or {})
    world = World(replace(state, disk_bytes=own_disk))
    if one_machine:
        world.belong_together(*disks)
    for node, free in disks.items():
        world.prepare(node, prepared(disk_bytes=free))
        world.report_links(node)
    world.settle()
    assert isinstance(world.state.phase, Stepping), "training goes on in any case"
    return world


def test_the_coordinators_disk_has_to_hold_the_checkpoints_that_are_kept_and_the_one_that_comes() -> None:
    needed = 3 * WEIGHTS + ROOM_BYTES
    kept = {"uri": "coordinator:", "keep": 2}
    assert begun({"a": 0, "b": 0}, needed, checkpoint=kept).events(ev.DiskShort) == []
    short = begun({"a": 0, "b": 0}, needed - 1, checkpoint=kept).events(ev.DiskShort)
    assert short == [ev.DiskShort("", needed - 1, needed)]
    assert "the coordinator's disk has 1.0 GiB free" in short[0].narrate()
    assert "lower checkpoint.keep" in short[0].narrate()


def test_all_of_the_state_takes_three_times_as_much_and_another_place_takes_nothing() -> None:
    state = {"uri": "coordinator:", "keep": 2, "holds": "state"}
    assert begun({"a": 0, "b": 0}, 1, checkpoint=state).events(ev.DiskShort) == [
        ev.DiskShort("", 1, 9 * WEIGHTS + ROOM_BYTES)
    ]
    assert begun({"a": 0, "b": 0}, 1).events(ev.DiskShort) == []


def test_a_nodes_disk_has_to_hold_its_snapshots() -> None:
    needed = SNAPSHOTS * 3 * WEIGHTS // 2
    short = begun({"a": needed, "b": needed - 1}).events(ev.DiskShort)
    assert short == [ev.DiskShort("b", needed - 1, needed)]
    assert "join --snapshots DIR" in short[0].narrate()


def test_the_nodes_of_a_machine_share_its_disk() -> None:
    needed = SNAPSHOTS * 3 * WEIGHTS
    short = begun({"a": needed - 1, "b": needed - 1}, one_machine=True).events(ev.DiskShort)
    assert short == [ev.DiskShort("a, b", needed - 1, needed)]


def test_it_is_said_once_of_a_plan_that_comes_again() -> None:
    world = begun({"a": 1, "b": 1})
    told = world.events(ev.DiskShort)
    world.lose("b")
    world.prepare("b", prepared(disk_bytes=1))
    world.report_links("b")
    world.wait(60, beating="ab")
    world.settle()
    assert world.state.ledger.training.generation > 1
    assert [event for event in world.events(ev.DiskShort) if event.nodes == "b"] == told[1:]
