"""Going back is asked, not taken: `core/copies/lost_state.py`, and `continue --from`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.copies.lost_state import ASK_SECONDS
from dtfm.coordinator.core.phases import Gathering, Stepping, Switching
from dtfm.coordinator.core.timeouts import CUT_OFF_LEASES, GRACE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.control_pb2 import SteerRequest
from tests.coordinator.answers import links
from tests.coordinator.doors import Door
from tests.coordinator.ledgers import altered
from tests.coordinator.script import BUCKETS, LEASE, LONG, World, prepared, restarted, training
from tests.coordinator.snapshots import claim, step_after, with_snapshot, with_snapshot_in_halves

LONG_STEP = ASK_SECONDS / 2
"""Two of these steps are more than may be lost without a word."""
WEIGHTS: dict[str, dict[str, Any]] = {
    "train": {"steps": 500, "evaluate_every": 0},
    "checkpoint": {"every": 2, "holds": "weights"},
}


def with_weights(steps: int = 5, **cluster: Any) -> World:
    """The weights of every second step are in checkpoints, and step ``steps`` + 1 is under way."""
    world = training(**WEIGHTS, cluster=cluster)
    for step in range(1, steps + 1):
        world.step()
        if step % 2 == 0:
            world.save()
    return world


def long_steps(world: World, number: int = 2) -> World:
    """Steps of LONG_STEP seconds each."""
    for _ in range(number):
        step_after(world, LONG_STEP)
    return world


def lose_all(world: World, nodes: str = "ab") -> None:
    """These nodes end with a goodbye, unlike nodes that are merely cut off."""
    for node in nodes:
        world.hear(node, goodbye=wire.Goodbye(reason="SIGKILL"))


def asked(world: World) -> str:
    """The question that stands; empty: none does."""
    waits = world.events(ev.Waiting)
    return waits[-1].reason if isinstance(world.state.phase, Gathering) and waits and waits[-1].asks else ""


def answer(world: World, wish: SteerRequest.Wish) -> str:
    """The coordinator's sentence to ``continue --from``."""
    Door(world)
    world.refusals.pop(1, None)
    world.feed(t.Asked(1, SteerRequest(wish=wish), "operator", 0.0))
    if (refused := world.refusals.get(1)) is not None:
        return str(refused)
    granted = world.granted[1]
    assert isinstance(granted, wire.Done)
    return granted.sentence


def test_with_weights_at_home_a_run_whose_state_is_lost_does_not_begin_again_by_itself() -> None:
    """However little work that is: it would be the weights' loss as well."""
    world = with_weights()
    lose_all(world)
    world.join("a", "b", incarnation=2)
    world.wait(100 * LEASE, beating="ab")
    assert world.events(ev.RolledBack) == []
    assert asked(world) == (
        "b left (goodbye: SIGKILL): nobody here has the state of step 5. To go on: `dtfm-coordinator continue --from weights`: "
        "from step 4 without AdamW's moments (1 step is lost, 0 s of work), or `dtfm-coordinator continue --from start` "
        "(5 steps are lost, 0 s of work)"
    )


def test_the_question_is_logged_once_and_shown_to_all() -> None:
    world = with_weights()
    lose_all(world)
    world.join("a", "b", incarnation=2)
    world.wait(100 * LEASE, beating="ab")
    assert len([event for event in world.events(ev.Waiting) if event.asks]) == 1
    assert "dtfm-coordinator continue --from weights" in world.told[world.streams["a"]][-1].waiting


def test_continue_from_weights_goes_on_with_moments_of_zero() -> None:
    world = with_weights()
    lose_all(world)
    world.join("a", "b", incarnation=2)
    assert answer(world, SteerRequest.FROM_WEIGHTS) == (
        "back from step 5 to step 4: operator goes on from the weights of step 4, as the state of step 5 is lost; 1 step is "
        "trained again from the weights of step 4; AdamW's moments begin at zero"
    )
    assigned = world.last_to("a", "assignment")
    assert (assigned.step, assigned.snapshot.folder) == (4, "memory://checkpoints/step-00000004")
    assert (assigned.snapshot.weights, assigned.island_began) == (True, 4)
    world.settle()
    world.step()
    assert world.state.ledger.training.step == 5
    assert world.refolded() == world.state.ledger


def test_weights_of_the_last_step_are_asked_for_too_as_their_moments_are_lost() -> None:
    world = with_weights(4)
    lose_all(world)
    world.join("a", "b", incarnation=2)
    assert "from step 4 without AdamW's moments (no step is lost)" in asked(world)
    answer(world, SteerRequest.FROM_WEIGHTS)
    assert world.last_to("a", "assignment").snapshot.weights


def test_continue_from_start_begins_again_and_deletes_no_weights() -> None:
    world = with_weights()
    lose_all(world)
    world.join("a", "b", incarnation=2)
    assert "5 steps are trained again from the start" in answer(world, SteerRequest.FROM_START)
    assert world.last_to("a", "assignment").step == 0
    assert world.tidied[-1].given_up == set()
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_a_run_that_is_paused_goes_on_by_the_same_command() -> None:
    world = with_weights()
    lose_all(world)
    answer(world, SteerRequest.PAUSE)
    world.join("a", "b", incarnation=2)
    assert not asked(world)
    answer(world, SteerRequest.FROM_WEIGHTS)
    assert isinstance(world.state.phase, Switching)
    assert world.state.ledger.hold is None


def test_while_nothing_is_lost_continue_from_is_refused() -> None:
    world = with_weights()
    for wish in (SteerRequest.FROM_WEIGHTS, SteerRequest.FROM_START):
        assert "no state is lost: the run has the state of step 5" in answer(world, wish)
    assert not world.events(ev.RolledBack)


def test_without_weights_continue_from_weights_is_refused_by_what_there_is() -> None:
    world = long_steps(training(**LONG))
    lose_all(world)
    world.join("a", "b", incarnation=2)
    assert answer(world, SteerRequest.FROM_WEIGHTS) == "there are no weights in a checkpoint. There are: 0 (the start)"


@pytest.mark.parametrize("steps", [1, 2])
def test_ten_minutes_of_work_are_not_given_up_by_itself(steps: int) -> None:
    world = long_steps(training(**LONG), steps)
    lose_all(world)
    world.join("a", "b", incarnation=2)
    if steps == 1:
        assert (world.events(ev.RolledBack)[-1].step, asked(world)) == (0, "")
    else:
        assert world.events(ev.RolledBack) == []
        assert asked(world).endswith(
            "To go on: `dtfm-coordinator continue --from start` (2 steps are lost, 10 min of work)"
        )


@pytest.mark.parametrize(("says", "goes_on"), [("weights", 4), ("start", 0)])
def test_the_run_file_may_answer_beforehand(says: str, goes_on: int) -> None:
    world = with_weights(when_state_is_lost=says)
    lose_all(world)
    world.join("a", "b", incarnation=2)
    assert [(back.step, back.weights) for back in world.events(ev.RolledBack)] == [(goes_on, says == "weights")]
    assert world.last_to("a", "assignment").snapshot.weights == (says == "weights")
    assert not [event for event in world.events(ev.Waiting) if event.asks]


def test_weights_that_the_run_file_names_and_that_are_not_there_are_asked_for() -> None:
    world = long_steps(training(**LONG, cluster={"when_state_is_lost": "weights"}))
    lose_all(world)
    world.join("a", "b", incarnation=2)
    assert "--from start" in asked(world)
    assert "--from weights" not in asked(world)


def test_a_snapshot_that_is_partly_away_is_waited_for_and_training_then_goes_on_by_itself() -> None:
    world = long_steps(with_snapshot_in_halves())
    lose_all(world)
    world.prepare("b", prepared(on_disk=[claim(2, (2, 3))]), incarnation=2)
    world.report_links("b")
    world.join("c")
    world.wait(100 * LEASE, beating="bc")
    assert world.events(ev.RolledBack) == []
    assert "start a again, with part of step 2 on disk (2 steps are lost, 10 min of work), or" in asked(world)
    world.prepare("a", prepared(on_disk=[claim(2, (0, 1))]), incarnation=2)
    world.hear("a", links("a", ["b", "c"]))
    world.wait(LEASE / 2, beating="abc")
    assert [back.step for back in world.events(ev.RolledBack)] == [2]
    assert isinstance(world.state.phase, Switching)


def test_of_a_snapshot_that_is_whole_training_goes_on_by_itself_however_old_it_is() -> None:
    """Nothing newer is anywhere."""
    world = long_steps(with_snapshot())
    lose_all(world)
    for node in "ab":
        world.prepare(node, prepared(on_disk=[claim(3, range(BUCKETS))]), incarnation=2)
        world.report_links(node)
    world.wait(LEASE, beating="ab")
    assert [back.step for back in world.events(ev.RolledBack)] == [3]
    assert not [event for event in world.events(ev.Waiting) if event.asks]


def test_nodes_that_may_be_cut_off_are_waited_for_as_long_as_they_look_for_the_coordinator() -> None:
    world = long_steps(with_snapshot(cluster={"wait_for_coordinator": 1800.0}))
    disk = prepared(on_disk=[claim(3, range(BUCKETS))])
    world.wait(1.5 * LEASE)  # both fall silent
    for node in "cd":
        world.prepare(node, disk if node == "c" else None, incarnation=2)
        world.report_links(node)
    world.wait(GRACE_LEASES * LEASE, beating="cd")
    assert world.events(ev.RolledBack) == []
    world.wait(600.0, beating="cd")
    assert "reconnect a, b, which may still have step 7 in memory (no step is lost), or" in asked(world)
    world.wait(1800.0, beating="cd")
    assert "part of step 3 on disk" in asked(world), "their processes have ended by now"


def test_after_a_restart_the_run_asks_only_once_its_nodes_had_time_to_come_back() -> None:
    world = restarted(long_steps(training(**LONG)), **LONG)
    world.join("c", "d")
    world.wait(GRACE_LEASES * LEASE - 5, beating="cd")
    assert not asked(world)
    assert "to return with the state as of step 2; then it asks" in world.events(ev.Waiting)[-1].reason
    world.wait(10, beating="cd")
    assert "reconnect a, b, which may still have step 2 in memory" in asked(world)
    world.join("a", "b")
    assert world.events(ev.RolledBack) == []
    assert world.last_to("c", "assignment").step == 2


def test_a_stage_that_fell_silent_is_waited_for_though_little_would_be_lost() -> None:
    """The coordinator is cut off from a. What a has is worth a second of work."""
    world = training("a", "b", **LONG, cluster={"stages": 2})
    world.automatic_standbys = False
    world.now += 1.0
    world.step()
    world.wait(LEASE + 3.0, beating="b")
    assert "a" not in world.state.members.sessions
    world.join("c")
    world.wait((CUT_OFF_LEASES - 3) * LEASE, beating="bc")
    assert world.events(ev.RolledBack) == []
    world.join("a")
    assert world.events(ev.RolledBack) == []
    assert world.donors_to("a")[:2] == [["a"], ["a"]]


def test_a_stage_that_stays_silent_does_not_stop_the_run_for_ever() -> None:
    world = training("a", "b", **LONG, cluster={"stages": 2})
    world.automatic_standbys = False
    world.now += 1.0
    world.step()
    world.wait(LEASE + 3.0, beating="b")
    world.join("c")
    world.wait((CUT_OFF_LEASES + 1) * LEASE, beating="bc")
    assert [back.step for back in world.events(ev.RolledBack)] == [0]


def test_a_node_that_is_back_is_waited_for_until_it_is_ready() -> None:
    """Training the lost step again would take a second. Its connection broke, so nothing says that it was cut off."""
    world = training("a", "b", **LONG, cluster={"stages": 2})
    world.automatic_standbys = False
    step_after(world, 1.0)
    world.lose("a")
    world.join("c")
    world.prepare("a")  # and measures its links
    world.wait(2 * LEASE, beating="abc")
    assert world.events(ev.RolledBack) == []
    world.report_links("a")
    world.wait(LEASE, beating="abc")
    assert world.donors_to("a")[:2] == [["a"], ["a"]]


def test_a_run_whose_last_weights_are_home_ends_and_asks_nothing() -> None:
    world = training(train={"steps": 2, "evaluate_every": 0}, checkpoint={"every": 2, "holds": "weights"})
    world.step()
    world.step()
    home = {2: ev.CheckpointWritten(2, "memory://checkpoints/step-00000002", "", weights=True)}
    world.state = replace(world.state, ledger=altered(world.state.ledger, checkpoints=home))
    lose_all(world)
    world.join("a", "b", incarnation=2)
    assert not asked(world)
    assert world.exit_code == 0
