"""Messages of members end no run of strangers. Two keys try each way in which a run can fail, and so does one key left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Pausing, Stepping, Switching
from dtfm.coordinator.core.state.state import ATTEMPTS
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LONG, MANIFEST, World, restarted
from tests.coordinator.strangers import come, open_run, strangers


def attempts(world: World, *liars: str) -> None:
    """Tries the next step until it is committed or nothing trains. While liars have a part in the step, each of them says that it
    fails."""
    step = world.state.ledger.training.step
    for _ in range(200):
        if isinstance(world.state.phase, Switching):
            world.settle()
        if world.exit_code is not None or not isinstance(world.state.phase, Stepping):
            return
        plan = world.plan_in_force
        spoilt = set(plan.nodes) & set(liars)
        for node in sorted(spoilt):
            world.vote(node, squared_gradient_norm=math.nan, generation=plan.generation)
        if not spoilt:
            world.step()
        if world.state.ledger.training.step > step:
            return
    raise AssertionError("it goes on for ever")


def test_two_nodes_that_report_nan_in_every_attempt_are_left_out_and_the_others_train_on() -> None:
    world = strangers(*"abkl", **LONG)
    world.automatic_tests = False
    attempts(world, "k", "l")
    assert world.exit_code is None
    assert world.events(ev.NodeQuarantined) == []
    assert world.state.ledger.training.step == 1
    assert world.state.ledger.working == tuple("ab")
    assert world.refolded() == world.state.ledger


def test_what_all_strangers_say_to_the_last_makes_the_run_wait_with_its_advice_also_after_a_restart() -> None:
    world = strangers("a", "b", "c", **LONG)
    world.automatic_tests = False
    attempts(world, "a", "b", "c")
    assert world.exit_code is None
    assert "Lower train.learning_rate" in world.events(ev.Waiting)[-1].reason
    again = restarted(world, **{**LONG, "trust": {"mode": "open"}, "cluster": {"nodes": 3}})
    assert again.state.ledger.health == world.state.ledger.health


def one_key(**changes: Any) -> World:
    """All members have one key. Of another one somebody has said what the run is, and left before the first step."""
    world = World(open_run(3, **{**LONG, **changes}))
    world.belong_together("a", "b", "c")
    come(world, "other")
    world.join("a")
    world.lose("other")
    world.join("b", "c")
    world.settle()
    return world


@pytest.mark.parametrize("problem", [wire.NON_FINITE, wire.OUT_OF_MEMORY, wire.INTERNAL])
def test_one_that_is_left_alone_cannot_end_it_by_failing(problem: wire.StepProblem) -> None:
    world = one_key()
    for _ in range(40):
        if isinstance(world.state.phase, Switching):
            world.settle()
        if isinstance(world.state.phase, Stepping):
            world.fail_step(world.plan_in_force.nodes[-1], problem)
        world.wait(world.state.lease, beating=world.state.members.sessions)
    assert world.exit_code is None
    assert world.events(ev.NodeQuarantined) == []


def test_nor_by_saying_that_it_cannot_take_its_part() -> None:
    world = one_key()
    world.fail_step("a", wire.INTERNAL)
    for _ in range(20):
        if isinstance(world.state.phase, Switching):
            world.fail_plan(world.plan_in_force.nodes[-1])
        world.wait(world.state.lease, beating=world.state.members.sessions)
    assert world.exit_code is None
    assert world.events(ev.NodeQuarantined) == []


def test_nor_by_silence_after_a_commit() -> None:
    world = one_key(train={"steps": 1}, checkpoint={"every": 0})
    world.step()
    world.evaluate()
    world.write_checkpoint()
    for _ in range(ATTEMPTS + 1):
        if isinstance(world.state.phase, Switching):
            world.settle()
        world.wait(2 * world.state.patience, beating=list(world.state.members.sessions))
    assert world.exit_code is None


def test_nor_by_not_writing_the_last_checkpoint() -> None:
    world = one_key(train={"steps": 1}, checkpoint={"every": 0})
    world.step()
    for _ in range(20):
        if isinstance(world.state.phase, Switching):
            world.settle()
        world.evaluate()
        if isinstance(world.state.phase, Pausing):
            world.write_snapshot(problem="no room")
            world.apply()
        world.wait(world.state.lease, beating=world.state.members.sessions)
    assert world.exit_code is None
    assert world.events(ev.NodeQuarantined) == []


def test_a_model_for_which_no_plan_is_possible_makes_strangers_wait() -> None:
    """Two may have described it so."""
    world = World(open_run(2, **LONG))
    world.automatic_planning = False
    come(world, "k", "l")
    assert world.state.ledger.data_confirmed
    world.feed(t.Planned(world.wanted[-1].number, "stages is 9; the model has 4 layers", hopeless=True))
    assert world.exit_code is None
    assert "stages is 9" in world.events(ev.Waiting)[-1].reason


@pytest.mark.parametrize("mode", ["open", "trusted"])
def test_who_sends_its_part_of_the_last_checkpoint_at_the_last_moment_leaves_time_for_the_manifest(mode: str) -> None:
    world = strangers("a", "b", train={"steps": 1}, checkpoint={"every": 0}, trust={"mode": mode})
    world.step()
    world.evaluate()
    world.apply()
    world.write_snapshot()
    world.wait(world.state.patience - 0.1, beating="ab")
    world.send_files()
    world.wait(1.0, beating="ab")
    assert world.state.safekeeping.upload is not None
    assert world.exit_code is None
    world.feed(t.ManifestDone(1, "", digest=MANIFEST))
    assert world.exit_code == 0
