"""Scripts of nodes that write snapshots to their disks and fetch each other's files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from dtfm.coordinator.core.copies.availability import availability
from dtfm.coordinator.core.copies.snapshot import PAUSE_LEASES
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage
from tests.coordinator.script import BUCKETS, LAYERS, LEASE, LONG, World, fresh_state, two_stages

PAUSE = PAUSE_LEASES * LEASE
SIZE = 100
DIGESTS = [bytes([bucket]) * 32 for bucket in range(BUCKETS)]


def parts(buckets: Collection[int], size: int = SIZE, digests: Sequence[bytes] = DIGESTS) -> list[wire.Part]:
    return [wire.Part(bucket=bucket, size_bytes=size, digest=digests[bucket]) for bucket in buckets]


def claim(step: int, buckets: Collection[int]) -> wire.Moved:
    """The files of a snapshot that a node finds on its disk when it prepares."""
    return wire.Moved(step=step, parts=[wire.Part(bucket=bucket, size_bytes=SIZE) for bucket in buckets])


def report_files(
    world: World, node: str, step: int, buckets: Collection[int], problem: str = "", **of_parts: Any
) -> None:
    """The node reports which of the files that it had to write or to fetch it has."""
    files = parts(buckets, **of_parts)
    world.hear(node, moved=wire.Moved(step=step, parts=files, problem=problem))


def report_written(world: World, *nodes: str) -> None:
    """Each of the nodes, by default all of the plan, has written what it trains as of the last commit."""
    plan = world.plan_in_force
    for node in nodes or plan.nodes:
        stage = plan.stage_of(node)
        assert stage is not None
        report_files(world, node, world.state.ledger.training.step, range(*plan.stages[stage].layers))


def report_fetched(world: World, step: int) -> None:
    """a and b, which train one half each, have fetched each other's files."""
    report_files(world, "a", step, [2, 3])
    report_files(world, "b", step, [0, 1])


def report_full_disk(world: World, step: int, *nodes: str) -> None:
    """The nodes could not fetch anything."""
    for node in nodes:
        report_files(world, node, step, [], problem="OSError: the disk is full")


def to_fetch(world: World, node: str) -> dict[int, list[str]]:
    """The parts that the node was asked to fetch since it was last told which snapshots to keep, and from which nodes."""
    wanted: dict[int, list[str]] = {}
    for message in world.heard_by(node):
        if message.HasField("keep"):
            wanted = {}
        elif not message.move.folder:
            wanted |= {part.bucket: list(part.nodes) for part in message.move.parts}
    return wanted


def all_to_fetch(world: World) -> dict[str, dict[int, list[str]]]:
    """What each node fetches that is asked to fetch anything."""
    return {node: wanted for node in world.streams if (wanted := to_fetch(world, node))}


def snapshot_begins(world: World) -> bool:
    """The last commit asked all nodes of the plan for a snapshot, or none of them."""
    begins = {bool(world.last_to(node, "commit").snapshot) for node in world.plan_in_force.nodes}
    assert len(begins) == 1
    return begins.pop()


def snapshot_due(*nodes: str, planner: Callable[[Iterable[str]], Plan | str] = two_stages, **changes: Any) -> World:
    """Nodes that train over links too slow for standbys; the next commit asks for a snapshot on disks."""
    cluster = {"nodes": len(nodes), **changes.get("cluster", {})}
    world = World(fresh_state(**{**LONG, **changes, "cluster": cluster}), planner)
    world.join(*nodes)
    world.settle()
    world.automatic_standbys = False
    world.now += 0.001
    world.step()
    world.now += PAUSE
    world.without_deadline()
    return world


def with_snapshot(**changes: Any) -> World:
    """a and b train one half each, and have both halves on disk as of step 3; they are at step 5."""
    world = snapshot_due("a", "b", **changes)
    world.now -= 0.002
    world.step()
    world.now += 0.002
    world.step()
    report_written(world)
    report_fetched(world, 3)
    for _ in range(2):
        world.step()
    return world


def with_snapshot_in_halves() -> World:
    """Of a snapshot of step 2 a has its half on disk and b the other, and neither has room for more."""
    world = snapshot_due("a", "b")
    world.step()
    report_written(world)
    report_full_disk(world, 2, "a", "b")
    return world


def plan_only_with(world: World, *nodes: str) -> None:
    """From now on the planner uses these one or two nodes alone, as replicas, and the run needs no others."""
    plan = Plan(0, (Stage((0, LAYERS), nodes, (4 // len(nodes),) * len(nodes)),), ())
    world.planner = lambda ids: plan if set(nodes) <= set(ids) else f"no plan without {nodes}"
    world.state = replace(world.state, run=fresh_state(cluster={"nodes": 1, "stages": "auto"}).run)


def step_after(world: World, seconds: float) -> None:
    """Time passes, and a step."""
    world.now += seconds
    world.step()


def step_on_disks(world: World) -> int:
    """The step of the whole snapshot on the disks of connected nodes; 0: none."""
    return replace(availability(world.state), memory=(), checkpoint=0).resume_point().step
