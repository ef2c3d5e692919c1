"""One of several strangers trains as it should, and lies in evaluations. Held-out samples are evaluated twice, along chains that
end at different nodes; where they differ, they do not count. Each node belongs to somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.test_poisoners import HONEST, audited
from tests.attacks.test_the_run_goes_on import LIAR, STEPS
from tests.cluster.launch import Cluster
from tests.cluster.runs import held_out_losses_alone, losses_alone


def are_those_of_one_process(cluster: Cluster, since: int) -> None:
    """All losses, and from step ``since`` on the held-out ones; none before."""
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)
    evaluated = [(event["step"], event["loss"]) for event in cluster.of("evaluated")]
    assert [step for step, _ in evaluated] == list(range(since, STEPS + 1))
    alone = held_out_losses_alone(cluster.run_file, STEPS)
    assert [loss for _, loss in evaluated] == pytest.approx(alone[since - 1 :], rel=1e-9)


@pytest.mark.soak
@pytest.mark.parametrize("stages", [[3], [2, 2]])
def test_honest_nodes_that_evaluate_each_sample_twice_come_to_the_same(tmp_path: Path, stages: list[int]) -> None:
    with audited(tmp_path, "", stages, HONEST[: sum(stages)], evaluate_every=1) as cluster:
        assert cluster.finish() == 0
        assert not cluster.of("suspected")
        assert not cluster.of("step_aborted")
        are_those_of_one_process(cluster, since=1)


def losses_are_those_of_one_process(cluster: Cluster) -> None:
    """Each held-out loss is the loss of some held-out samples, as one process computes it."""
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)
    alone = held_out_losses_alone(cluster.run_file, STEPS)
    for event in cluster.of("evaluated"):
        assert event["loss"] == pytest.approx(alone[event["step"] - 1], rel=1e-9 if event["samples"] == 8 else 0.02)


@pytest.mark.soak
def test_who_reports_wrong_held_out_losses_trains_no_longer(tmp_path: Path) -> None:
    """The next plan keeps it apart from both others. What it has trained stays."""
    steps, nodes = 60, (*HONEST[:2], LIAR)
    with audited(tmp_path, "lies_in_evaluations", [3], nodes, steps=steps, evaluate_every=1) as cluster:
        assert cluster.finish() == 0
        assert {event["charge"] for event in cluster.of("suspected")} == {"EVALUATION"}
        (stage,) = cluster.of("plan_adopted")[-1]["plan"]["stages"]
        assert sorted(stage["replicas"]) == sorted(HONEST[:2])
        assert {event["node"] for event in cluster.of("node_quarantined")} <= {LIAR}
        assert not cluster.of("rolled_back")
        alone = losses_alone(cluster.run_file)
        assert cluster.losses == pytest.approx(alone, rel=0.02), "strangers clip each other's largest gradients"


@pytest.mark.soak
def test_where_wrong_held_out_activations_are_passed_on_nobody_is_thrown_out_for_what_came_to_it(
    tmp_path: Path,
) -> None:
    """It is known where a contradiction ends, and not where it began. What went through the liar does not count."""
    with audited(tmp_path, "misevaluates", [3, 2], (*HONEST[:4], LIAR), evaluate_every=1) as cluster:
        assert cluster.finish() == 0
        assert not cluster.of("suspected")
        assert not cluster.of("node_quarantined")
        losses_are_those_of_one_process(cluster)


@pytest.mark.soak
def test_who_dies_in_the_last_evaluation_does_not_keep_the_others_waiting_for_it(tmp_path: Path) -> None:
    """It is on the first stage, so that others wait for its tensors. They evaluate again if it had not written its part of
    the checkpoint."""
    with audited(tmp_path, "dies_at_the_end", [2, 2], (LIAR, "x", "y", "z"), evaluate_every=0) as cluster:
        assert cluster.finish() == 0
        assert not cluster.of("node_quarantined")
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)
        last = held_out_losses_alone(cluster.run_file, STEPS)[-1]
        evaluated = [(event["step"], event["loss"]) for event in cluster.of("evaluated")]
        assert evaluated in ([], [(STEPS, pytest.approx(last, rel=1e-9))])
