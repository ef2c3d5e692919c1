"""The held-out loss and the pause that follow a commit: `core/step/evaluation.py`, `core/step/pause.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import pytest

from dtfm.coordinator.core.transition import ManifestDone
from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.answers import DIGEST
from tests.coordinator.audit_scripts import replicas
from tests.coordinator.script import LAYERS, LEASE, World, fresh_state, training
from tests.coordinator.strangers import come, open_run


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite_is_ignored_and_drops_nobody(value: float) -> None:
    world = training()
    world.step()
    world.step()
    world.hear("b", evaluated=wire.Evaluated(generation=1, step=2, losses=[2.0, 2.0, value, 2.0]))
    assert set(world.state.members.sessions) == {"a", "b"}
    assert not world.events(ev.Evaluated)
    world.step()
    assert world.events(ev.StepCommitted)[-1].step == 3


def test_many_held_out_losses_are_added_up_in_no_time() -> None:
    held_out = 1 << 14
    world = training(train={"evaluate_every": 1, "evaluation_samples": 2 * held_out})
    world.step()
    began = time.monotonic()
    world.hear("b", evaluated=wire.Evaluated(generation=1, step=1, losses=[2.0] * held_out))
    assert time.monotonic() - began < 5, "it took 40 s when all were looked through for each"
    assert world.events(ev.Evaluated)[-1].loss == 2.0


def test_two_lies_about_held_out_losses_under_one_plan_throw_out_nobody() -> None:
    """The plan that keeps the pairs apart is still being made."""
    names = ("liar", "y", "z")
    train = {"steps": 500, "evaluate_every": 1, "evaluation_samples": 8}
    world = World(open_run(3, train=train, cluster={"stages": "auto"}, trust={"audit_rate": 0.02}), replicas)
    come(world, *names)
    world.settle()
    world.automatic_planning = False
    for _ in range(2):
        world.step()
        evaluation = world.state.evaluation
        assert evaluation is not None
        for node, numbers in evaluation.expected.items():
            losses = [9.0 if node == "liar" else 2.0] * len(numbers)
            said = wire.Evaluated(generation=evaluation.generation, step=evaluation.step, losses=losses)
            world.hear(node, evaluated=said)
    assert kept_apart(world.state.ledger) == {("liar", "y"), ("liar", "z")}
    assert world.events(ev.NodeQuarantined) == []


def test_losing_a_peer_stream_during_the_last_evaluation_does_not_fail_the_run() -> None:
    world = training()
    for _ in range(3):
        world.step()
    world.apply()
    world.save()
    assert world.exit_code is None
    world.fail_step("a", wire.PEER_LOST, peer="b", step=4)
    assert world.exit_code == 0
    assert not world.events(ev.StepAborted)


def test_who_has_no_part_in_a_held_out_loss_cannot_end_it() -> None:
    world = training()
    world.stick_to_plan()
    world.join("c")
    for _ in range(3):
        world.step()
    assert world.state.evaluation is not None
    world.fail_step("c", wire.INTERNAL)
    assert world.state.evaluation is not None
    world.fail_step("a", wire.INTERNAL)
    assert world.state.evaluation is None


@pytest.mark.parametrize(("held_out", "expected"), [(1, "c"), (2, "cd"), (8, "cd")])
def test_nodes_that_end_the_chains_of_held_out_micro_batches_report_the_loss(held_out: int, expected: str) -> None:
    """Training micro-batches 0 and 2 end on c, 1 and 3 on d; the held-out ones travel their chains in turn."""
    train = {"evaluate_every": 1, "evaluation_samples": 2 * held_out}

    def plan(_: Iterable[str]) -> Plan:
        stages = (Stage((0, 2), ("a", "b"), ()), Stage((2, LAYERS), ("c", "d"), ()))
        return from_routes(0, stages, [(("a", "c"), 2), (("b", "d"), 2)])

    world = World(fresh_state(cluster={"nodes": 4}, train={"steps": 10, **train}), plan)
    world.join(*"abcd")
    world.settle()
    world.step()
    evaluation = world.state.evaluation
    assert evaluation is not None
    assert sorted(number for numbers in evaluation.expected.values() for number in numbers) == list(range(held_out))
    assert evaluation.expected.keys() == set(expected)
    for node, due in evaluation.expected.items():
        world.hear(node, evaluated=wire.Evaluated(generation=1, step=1, losses=[4.0] * len(due)))
    assert [event.samples for event in world.events(ev.Evaluated)] == [2 * held_out]


def test_a_held_out_loss_over_no_samples_is_given_up() -> None:
    world = training("a", "b", train={"steps": 100, "evaluate_every": 2})
    world.step()
    world.step()
    node = world.plan_in_force.stages[-1].replicas[-1]
    world.hear(node, evaluated=wire.Evaluated(generation=1, step=2))
    assert world.state.evaluation is None


def test_of_two_held_out_losses_the_older_one_is_given_up() -> None:
    world = training("a", "b", train={"steps": 100, "evaluate_every": 2})
    for _ in range(5):
        world.step()
    assert world.state.evaluation is not None
    assert world.state.evaluation.step == 4


def test_losing_a_node_after_the_last_step_is_harmless_once_its_files_have_come() -> None:
    world = training(train={"steps": 1})
    world.step()
    world.evaluate()
    world.write_checkpoint()
    world.lose("b")
    world.hear("a", applied=wire.Applied(generation=1, step=1, state_digest=DIGEST))
    assert world.exit_code is None
    world.feed(ManifestDone(1, ""))
    assert world.exit_code == 0


def test_losing_a_stage_before_the_last_checkpoint_is_whole_means_training_again() -> None:
    world = training("a", "b", train={"steps": 3})
    world.step()
    world.step()
    world.save()
    world.step()
    world.lose("b")
    assert world.events(ev.CheckpointFailed)[-1].step == 3
    world.join("b2")
    assert world.events(ev.RolledBack)[-1].step == 2
    world.settle()
    world.finish_run()
    assert world.exit_code == 0


@pytest.mark.parametrize("returns", [False, True])
def test_a_replica_that_is_lost_while_the_last_snapshot_is_written_is_not_waited_for(returns: bool) -> None:
    """If it returns, its new process has not seen the commit, so it has nothing to confirm."""
    world = training("a", "b", "c", train={"steps": 1})
    world.step()
    world.lose("a")
    if returns:
        world.join("a")
    for node in "bc":
        world.write_snapshot(node)
        world.hear(node, applied=wire.Applied(generation=1, step=1, state_digest=DIGEST))
    world.evaluate()
    world.save()
    assert world.exit_code == 0


def test_if_the_last_checkpoint_fails_and_a_replica_is_away_the_others_go_on_by_another_plan() -> None:
    world = training("a", "b", "c", train={"steps": 1})
    world.step()
    world.evaluate()
    world.lose("a")
    for node in "bc":
        world.hear(node, applied=wire.Applied(generation=1, step=1, state_digest=DIGEST))
    world.write_snapshot("b", "c", problem="the disk is full")
    world.wait(3 * LEASE, beating="bc")
    assert set(world.plan_in_force.nodes) == {"b", "c"}
    world.settle()
    world.evaluate()
