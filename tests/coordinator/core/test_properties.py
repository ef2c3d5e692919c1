"""Rules that hold for any events in any order."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import example, given, strategies as st

from dtfm.coordinator.core.phases import Pausing
from dtfm.coordinator.core.timeouts import CUT_OFF_LEASES
from dtfm.coordinator.log import events as ev
from tests.coordinator.audit_scripts import replicas
from tests.coordinator.moves import MOVES, play
from tests.coordinator.script import LEASE, World, fresh_state

A_NODE_FALLS_SILENT = [
    ("advance", ""),
    ("join", "d"),
    ("join", "c"),
    ("join", "b"),
    ("advance", ""),
    ("join", "a"),
    ("advance", ""),
    ("advance", ""),
]


@given(
    st.lists(MOVES, min_size=10, max_size=60),
    st.integers(1, 3),
    st.sampled_from(["auto", 1, 2]),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
)
def test_no_step_is_skipped_or_committed_twice_and_the_log_is_the_state(
    moves: list[tuple[Any, ...]], nodes: int, stages: Any, audit_rate: float, answered: bool
) -> None:
    least = 1 if stages == "auto" else stages
    cluster, trust = {"nodes": max(nodes, least), "stages": stages}, {"audit_rate": audit_rate}
    world = World(fresh_state(cluster=cluster, train={"steps": 5}, trust=trust))
    world.automatic_audits = answered
    if stages != 2:
        world.planner = replicas
    for node in ["a", "b", "c"][:nodes]:
        world.join(node)
    for move in moves:
        play(world, move)
        assert world.refolded() == world.state.ledger

    step, generation, over = 0, 0, False
    for event in world.log:
        assert not (over and isinstance(event, ev.StepCommitted | ev.PlanAdopted | ev.RunFinished | ev.RunFailed))
        match event:
            case ev.StepCommitted():
                assert (event.step, event.generation) == (step + 1, generation)
                assert event.samples == 8
                assert math.isfinite(event.loss)
                step = event.step
            case ev.RolledBack():
                assert (event.from_step, event.step <= step) == (step, True)
                step = event.step
            case ev.PlanAdopted():
                assert (event.generation, event.step) == (generation + 1, step)
                generation = event.generation
            case ev.RunFinished() | ev.RunFailed():
                over = True
    assert over == (world.exit_code is not None)


@given(st.lists(MOVES, min_size=5, max_size=40))
def test_members_are_the_nodes_with_a_stream_and_silence_ends_a_membership(moves: list[tuple[Any, ...]]) -> None:
    world = World(fresh_state(cluster={"nodes": 2}, train={"steps": 5}))
    world.join("a", "b")
    for move in moves:
        play(world, move)
        assert set(world.state.ledger.members) == set(world.state.members.sessions)
    if world.exit_code is None:
        world.wait(3 * LEASE)  # scripted nodes still answer what they are asked when another one leaves
        assert not world.state.ledger.members


@example([("advance",)] * 6 + [("report_files",)])
@example([(name, node) if node else (name,) for name, node in A_NODE_FALLS_SILENT] + [("wait", 60.0)])
@given(st.lists(MOVES, min_size=5, max_size=40))
def test_a_run_can_be_finished_from_any_state(moves: list[tuple[Any, ...]]) -> None:
    """With new nodes that do their part every run finishes, unless it has failed with a reason."""
    world = World(fresh_state(cluster={"nodes": 2, "stages": 2}, train={"steps": 5}, trust={"audit_rate": 1.0}))
    world.join("a", "b")
    for move in moves:
        play(world, move)
    for node in list(world.state.members.sessions):
        world.lose(node)
    if world.exit_code is not None:
        return
    world.join("x", "y")
    training = world.state.ledger.training
    as_long_as_redoing = training.step * (training.step_seconds or 0.0)  # for "a" and "b" to return
    phase = world.state.phase
    for_files = world.state.patience if isinstance(phase, Pausing) else 0.0  # of the last step, on their disks
    world.wait((CUT_OFF_LEASES + 2) * LEASE + as_long_as_redoing + for_files, beating=["x", "y"])
    world.settle()
    world.finish_run()
    assert world.exit_code == 0
