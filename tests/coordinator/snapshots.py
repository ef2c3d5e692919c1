"""Scripts of nodes that write backups and fetch each other's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from dtfm.coordinator.core.safekeeping.availability import Kind, availability
from dtfm.coordinator.core.safekeeping.snapshot import PAUSE_LEASES
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Route, Stage
from tests.coordinator.script import BUCKETS, LAYERS, LEASE, LONG, World, fresh_state, training

PAUSE = PAUSE_LEASES * LEASE
SIZE = 100
DIGESTS = [bytes([bucket]) * 32 for bucket in range(BUCKETS)]


def parts(buckets: Collection[int]) -> list[wire.Part]:
    return [wire.Part(bucket=bucket, size_bytes=SIZE, digest=DIGESTS[bucket]) for bucket in buckets]


def keep(world: World, node: str, step: int, buckets: Collection[int], problem: str = "") -> None:
    """The node says what it has written, or fetched."""
    world.hear(
        node,
        snapshot_parts=wire.SnapshotParts(destination=wire.DISKS, step=step, parts=parts(buckets), problem=problem),
    )


def write(world: World, *nodes: str) -> None:
    """Each of the nodes, or of the plan's, has written what it trains as of the last commit."""
    plan = world.plan_in_force
    for node in nodes or plan.nodes:
        stage = plan.stage_of(node)
        assert stage is not None
        keep(world, node, world.state.ledger.step, range(*plan.stages[stage].layers))


def missing(world: World, node: str) -> dict[int, list[str]]:
    """What the node was last asked to fetch, and from whom."""
    return {part.bucket: list(part.nodes) for part in world.last_to(node, "keep_snapshots").missing}


def slow_world(*nodes: str, **changes: Any) -> World:
    """Nodes that train, over links that no copy could keep up with, past the time when a backup is due."""
    world = training(*nodes, **{**LONG, **changes})
    world.automatic_standbys = False
    world.now += 0.001
    world.step()
    world.now += PAUSE
    return world


def backed_up(*nodes: str, **changes: Any) -> World:
    """a and b train one half each, and have each other's on disk too, as of step 3; they are at step 5."""
    world = slow_world(*(nodes or ("a", "b")), **changes)
    world.now -= 0.002
    world.step()
    world.now += 0.002
    world.step()
    write(world)
    keep(world, "a", 3, [2, 3])
    keep(world, "b", 3, [0, 1])
    for _ in range(2):
        world.step()
    return world


def backed_up_apart() -> World:
    """Of a backup as of step 2 a has its half on disk, b the other, and neither has room for more."""
    world = slow_world("a", "b")
    world.step()
    write(world)
    for node in "ab":
        keep(world, node, 2, [], problem="OSError: the disk is full")
    return world


def alone(world: World, node: str) -> None:
    """From now on a plan is made of this node alone."""
    world.planner = lambda ids: Plan(0, (Stage((0, LAYERS), (node,)),), (Route((node,), 4),))
    world.state = replace(world.state, run=fresh_state(cluster={"nodes": 1, "stages": "auto"}).run)


def later(world: World, seconds: float) -> None:
    """After so many seconds, a step."""
    world.now += seconds
    world.step()


def step_on_disks(world: World) -> int:
    """The step of the snapshot that is whole on the disks of nodes that are here; 0: there is none."""
    table = availability(world.state)
    files = tuple(tuple(copy for copy in bucket if copy.kind is Kind.DISK) for bucket in table.files)
    return replace(table, memory=(), files=files).resume_point().step
