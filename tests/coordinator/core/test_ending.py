"""How a run ends: `core/ending.py`."""

from __future__ import annotations

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import World, training


def test_a_run_trains_evaluates_checkpoints_and_finishes() -> None:
    world = training()
    world.step()
    world.step()
    commit = world.last_to("a", "commit")
    assert (commit.evaluate, commit.snapshot, commit.pause) == (True, True, False)
    world.evaluate()
    world.save()
    world.step()
    commit = world.last_to("a", "commit")
    assert (commit.evaluate, commit.snapshot, commit.pause) == (True, True, True)
    assert world.exit_code is None
    world.evaluate()
    world.save()
    assert world.exit_code is None
    world.apply()
    assert world.exit_code == 0
    assert world.last_to("a", "finish").completed
    assert [event.step for event in world.events(ev.StepCommitted)] == [1, 2, 3]
    assert [(event.step, event.loss) for event in world.events(ev.Evaluated)] == [(2, 2.0), (3, 2.0)]
    assert [event.folder for event in world.events(ev.CheckpointWritten)] == [
        "memory://checkpoints/step-00000002",
        "memory://checkpoints/step-00000003",
    ]


def test_a_run_that_no_nodes_could_train_fails() -> None:
    world = World()
    world.automatic_planning = False
    world.join("a", "b")
    world.belong_together("a", "b")
    world.feed(t.Planned(world.wanted[-1].number, "stages is 9; the model has 4 layers", hopeless=True))
    assert world.exit_code == 1


def test_a_coordinator_that_stops_dismisses_nobody() -> None:
    world = training()
    world.feed(t.StopAsked("Ctrl-C"))
    assert world.log[-1] == ev.CoordinatorStopped("Ctrl-C")
    assert world.exit_code == 1
    assert "finish" not in world.kinds_to("a")
    assert world.streams["a"] in world.hung_up
    world.hear("a", heartbeat=wire.Heartbeat())
    world.greet("c")
    world.lose("b")
    assert world.state.ledger == world.refolded()
    stopped = world.names().index("coordinator_stopped")
    assert set(world.names()[stopped + 1 :]) <= {"node_left"}


def test_who_comes_after_the_end_is_told_of_it() -> None:
    world = training()
    world.finish_run()
    stream = world.greet("c")
    assert stream in world.hung_up
    told = world.said[stream][-1].finish
    assert told.completed
    assert told.reason.startswith("The run is over, step 3: all 3 steps are trained")
