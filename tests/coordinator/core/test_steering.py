"""An operator pauses a run, goes on with it, or stops it: `core/steering.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering, Pausing, Stepping, Switching
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.control_pb2 import SteerRequest
from tests.coordinator.doors import Door
from tests.coordinator.script import LEASE, LONG, World, restarted, training


def steer(world: World, wish: SteerRequest.Wish, by: str = "operator") -> str:
    """The coordinator's sentence."""
    Door(world)
    world.feed(t.SteerAsked(1, wish, by))
    if (refused := world.refusals.pop(1, None)) is not None:
        return str(refused)
    granted = world.granted[1]
    assert isinstance(granted, wire.SteerReply)
    return granted.sentence


def paused() -> World:
    """Step 1 is committed, and the run paused after it."""
    world = training(**LONG)
    steer(world, SteerRequest.PAUSE)
    world.step()
    world.apply()
    return world


def test_no_step_begins_after_the_one_in_hand_until_the_run_goes_on() -> None:
    world = training(**LONG)
    assert steer(world, SteerRequest.PAUSE).startswith("operator paused the run: no step begins until")
    assert isinstance(world.state.phase, Stepping), "the step in hand goes on"
    world.step()
    commit = world.last_to("a", "commit")
    assert (commit.step, commit.pause, commit.snapshot) == (1, True, True)
    world.apply()
    assert isinstance(world.state.phase, Gathering)
    assert "operator paused the run" in world.events(ev.Waiting)[-1].reason
    world.save()
    assert world.exit_code is None
    assert set(world.state.members.sessions) == {"a", "b"}
    begun = world.kinds_to("a").count("begin")
    assert steer(world, SteerRequest.CONTINUE) == "the run goes on"
    world.settle()
    assert world.kinds_to("a").count("begin") == begun + 1
    world.step()
    assert [event.step for event in world.events(ev.StepCommitted)] == [1, 2]
    assert not world.events(ev.RolledBack)


def test_a_plan_that_has_just_been_adopted_does_not_begin_during_a_pause() -> None:
    world = training("a", "b", "c", **LONG)
    world.lose("c")
    assert isinstance(world.state.phase, Switching)
    steer(world, SteerRequest.PAUSE)
    world.settle()
    assert isinstance(world.state.phase, Gathering)
    steer(world, SteerRequest.CONTINUE)
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_a_pause_outlives_the_coordinator() -> None:
    world = restarted(paused(), **LONG)
    world.join("a", "b")
    assert isinstance(world.state.phase, Gathering)
    assert not world.wanted
    steer(world, SteerRequest.CONTINUE)
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_a_run_stops_once_its_last_step_is_in_a_checkpoint_and_is_not_over() -> None:
    world = training(**LONG)
    assert steer(world, SteerRequest.STOP).startswith("operator stops the run")
    world.step()
    world.apply()
    assert isinstance(world.state.phase, Pausing), "the checkpoint is not whole"
    assert world.exit_code is None
    world.save()
    assert world.exit_code == 0
    [stopped] = world.events(ev.RunStopped)
    assert stopped.step == 1
    assert stopped.reason.startswith("operator stopped the run after step 1; ")
    assert world.last_to("a", "finish") == wire.Finish(stopped=True, reason=stopped.reason)
    assert world.refolded().outcome is None
    assert world.refolded().hold is None
    again = restarted(world, **LONG)
    again.join("a", "b")
    again.settle()
    assert again.last_to("a", "begin").step == 2


def test_a_checkpoint_that_fails_is_tried_again_before_the_run_stops() -> None:
    world = training(**LONG)
    steer(world, SteerRequest.STOP)
    world.step()
    world.apply()
    world.write_checkpoint(problem="the storage is full")
    assert world.exit_code is None
    world.wait(3 * LEASE, beating=("a", "b"))
    world.save()
    assert world.exit_code == 0
    assert [event.step for event in world.events(ev.RunStopped)] == [1]


def test_a_paused_run_stops_at_once_if_its_state_is_safe_already() -> None:
    world = paused()
    world.save()
    for node in "ab":  # nothing is needed of them
        world.lose(node)
    steer(world, SteerRequest.STOP)
    assert world.exit_code == 0
    assert [event.step for event in world.events(ev.RunStopped)] == [1]


def test_a_paused_run_whose_state_is_not_safe_writes_it_first() -> None:
    world = paused()
    world.write_checkpoint(problem="the storage is full")
    steer(world, SteerRequest.STOP)
    assert world.exit_code is None
    world.settle()
    world.apply()
    world.save()
    assert world.exit_code == 0
    assert [event.step for event in world.events(ev.StepCommitted)] == [1], "no step is trained for it"


def test_a_stop_that_is_taken_back_stops_nothing() -> None:
    world = training(**LONG)
    steer(world, SteerRequest.STOP)
    steer(world, SteerRequest.CONTINUE)
    world.step()
    assert isinstance(world.state.phase, Stepping)
    assert steer(world, SteerRequest.CONTINUE) == "the run is not paused"


def test_stopping_now_waits_for_nothing_and_says_what_is_left() -> None:
    world = training(**LONG)
    world.step()
    assert steer(world, SteerRequest.STOP_NOW) == "the run stops now"
    assert world.exit_code == 0
    assert "after step 1, of which the newest checkpoint is that of step 0" in world.events(ev.RunStopped)[0].reason
    assert steer(world, SteerRequest.PAUSE) == "the run is over, or has stopped already"


def test_a_run_that_nobody_trains_stops_without_them_but_waits_for_those_who_may_return() -> None:
    world = training(**LONG)
    world.step()
    steer(world, SteerRequest.STOP)
    again = restarted(world, **LONG)
    again.wait(GRACE_LEASES * again.state.lease - 1)
    assert again.exit_code is None
    again.wait(1)
    assert again.exit_code == 0
    fresh = World()
    steer(fresh, SteerRequest.STOP)
    assert fresh.exit_code == 0, "nothing is trained yet"


@pytest.mark.parametrize("wish", SteerRequest.Wish.values())
def test_only_operators_steer(wish: SteerRequest.Wish) -> None:
    world = training(**LONG)
    Door(world).enrolled("viewer", "viewer")
    assert "this is for the role operator" in steer(world, wish, by="viewer")
    assert not world.events(ev.RunPaused) + world.events(ev.RunStopped)
