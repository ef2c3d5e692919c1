"""An operator goes back to an earlier step: `core/plan/rollback.py`."""

from __future__ import annotations

from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering, Stepping
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.control_pb2 import SteerRequest
from tests.coordinator.doors import Door
from tests.coordinator.islands import ROUNDS, exchange, islands
from tests.coordinator.script import BUCKETS, LONG, World, restarted, training
from tests.coordinator.snapshots import with_snapshot, with_snapshot_in_halves

WEIGHTS: dict[str, dict[str, Any]] = {
    "train": {"steps": 500, "evaluate_every": 0},
    "checkpoint": {"every": 2, "holds": "weights"},
}


def roll_back(world: World, step: int, *, only_say: bool = False) -> str:
    """The coordinator's sentence."""
    Door(world)
    world.feed(t.Asked(1, SteerRequest(wish=SteerRequest.ROLLBACK, step=step, only_say=only_say), "operator", 0.0))
    if (refused := world.refusals.pop(1, None)) is not None:
        return str(refused)
    granted = world.granted[1]
    assert isinstance(granted, wire.Done)
    return granted.sentence


def with_weights(steps: int = 5) -> World:
    """The weights of every second step are in checkpoints, and step ``steps`` + 1 is under way."""
    world = training(**WEIGHTS)
    for step in range(1, steps + 1):
        world.step()
        if step % 2 == 0:
            world.save()
    return world


def test_training_goes_back_to_a_snapshot_and_gives_up_the_step_in_hand() -> None:
    world = with_snapshot()
    assert roll_back(world, 3) == (
        "back from step 5 to step 3: operator went back to step 3; 2 steps are trained again from the disks' snapshot of step 3"
    )
    assert world.last_to("a", "abort").step == 6
    assignment = world.last_to("b", "assignment")
    assert (assignment.step, len(assignment.snapshot.parts), assignment.island_began) == (3, BUCKETS, 0)
    assert assignment.generation == assignment.counts_from == 2
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    assert world.state.phase.step == 4
    assert world.refolded() == world.state.ledger


def test_a_step_that_is_nowhere_is_refused_by_those_that_there_are() -> None:
    world = with_weights()
    there = (
        "There are: 4 (the whole state, on the disks of a, b); 2 (the weights, without AdamW's moments, in "
        "memory://checkpoints/step-00000002); 0 (the start)"
    )
    for step in (3, 6, 400):
        assert roll_back(world, step) == f"the state after step {step} is nowhere. {there}"
    assert roll_back(world, 5) == f"the run is at step 5, and needs no way back there. {there}"
    assert not world.events(ev.RolledBack)


def test_if_parts_of_a_snapshot_are_missing_their_holders_are_named() -> None:
    world = with_snapshot_in_halves()
    world.step()
    world.lose("a")
    assert roll_back(world, 2) == (
        "part of the state after step 2 is on the disks of nodes that are not here: a. There are: 0 (the start)"
    )


def test_a_long_list_is_cut_in_the_middle() -> None:
    world = training(**{**WEIGHTS, "checkpoint": {"every": 1, "holds": "weights", "keep": 20}})
    for _ in range(12):
        world.step()
        world.save()
    told = roll_back(world, 99)
    assert told.count("(") == 8
    assert "4 more; 0 (the start)" in told


def test_a_dry_request_says_what_would_be_lost_and_changes_nothing() -> None:
    world = with_weights()
    phase, logged = world.state.phase, len(world.log)
    assert roll_back(world, 2, only_say=True) == (
        "training would go back from step 5 to step 2 (the weights, without AdamW's moments, in "
        "memory://checkpoints/step-00000002): 3 steps would be lost; AdamW's moments begin at zero; the checkpoints of steps 4 "
        "are deleted"
    )
    assert world.state.phase is phase
    assert not world.log[logged:]


def test_from_weights_training_goes_on_with_moments_of_zero_also_over_a_crash_or_a_loss() -> None:
    world = with_weights()
    assert "3 steps are trained again from the weights of step 2; AdamW's moments begin at zero" in roll_back(world, 2)
    for again in (False, True):
        if again:  # all memory is gone, too
            world = restarted(world, **WEIGHTS)
            world.join("a", "b", incarnation=7)
        assigned = world.last_to("a", "assignment")
        assert (assigned.step, assigned.snapshot.folder) == (2, "memory://checkpoints/step-00000002")
        assert (assigned.snapshot.weights, assigned.island_began, assigned.trained_before) == (True, 2, 2)
        assert not assigned.snapshot.states, "the agreed state had other moments"
    world.settle()
    world.step()
    assert world.state.ledger.training.step == 3
    assert world.state.ledger.training.moments_began(0) == 2
    for node in "ab":
        world.lose(node)
    world.join("c", "d")
    world.wait(1000, beating="cd")
    assert [(back.step, back.weights) for back in world.events(ev.RolledBack)] == [(2, True)]
    assert world.last_to("c", "assignment").snapshot.weights
    assert world.last_to("c", "assignment").trained_before == 2
    assert world.refolded() == world.state.ledger


def test_later_checkpoints_go_and_an_older_one_of_the_whole_state_does_not_take_their_place() -> None:
    world = with_weights(9)
    roll_back(world, 6)
    assert world.tidied[-1].given_up == {8}
    assert world.tidied[-1].newest == 6
    assert world.last_to("a", "assignment").step == 6


def test_a_run_that_is_paused_stays_so_and_goes_on_from_there() -> None:
    world = with_weights()
    pause(world, SteerRequest.PAUSE)
    world.step()
    world.apply()
    assert isinstance(world.state.phase, Gathering)
    roll_back(world, 4)
    assert world.state.ledger.hold is not None
    assert isinstance(world.state.phase, Gathering)
    pause(world, SteerRequest.CONTINUE)
    world.settle()
    assert world.last_to("a", "begin").step == 5


def pause(world: World, wish: SteerRequest.Wish) -> None:
    Door(world)
    world.feed(t.Asked(2, SteerRequest(wish=wish), "operator", 0.0))


def test_a_run_that_is_to_stop_does_so_after_the_step_to_which_it_goes_back() -> None:
    world = with_weights()
    pause(world, SteerRequest.STOP)
    roll_back(world, 2)
    assert world.exit_code == 0
    assert [event.step for event in world.events(ev.RunStopped)] == [2]
    world = restarted(world, **WEIGHTS)
    world.join("a", "b", incarnation=7)
    assert world.last_to("a", "assignment").snapshot.weights


def test_a_run_that_is_over_has_to_get_more_steps_first() -> None:
    world = training()
    world.finish_run()
    assert roll_back(world, 2).endswith("; set train.steps to more first, and it goes on")


@pytest.mark.parametrize("at", [0, 1])
def test_the_start_is_always_there_but_from_the_start_there_is_no_way_back(at: int) -> None:
    world = training(**LONG)
    for _ in range(at):
        world.step()
    told = roll_back(world, 0)
    assert told.endswith("1 step is trained again from the start" if at else "There is nothing before it")
    world.settle()
    assert world.last_to("a", "begin").step == 1


def test_islands_all_begin_with_the_weights_of_an_exchange() -> None:
    world = islands("a", "b", "c", "d", checkpoint={"every": ROUNDS + 1, "holds": "weights"})
    exchange(world)
    world.save()
    exchange(world)
    world.save()
    world.step()
    assert "4 steps are trained again from the weights of step 3" in roll_back(world, 3)
    for node in "abcd":
        assigned = world.last_to(node, "assignment")
        assert (assigned.step, assigned.snapshot.weights, assigned.island_began) == (3, True, 3)
        assert assigned.trained_before == ROUNDS
    world.settle()
    assert isinstance(world.state.phase, Stepping)
