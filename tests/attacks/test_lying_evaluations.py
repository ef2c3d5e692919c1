"""One of several strangers trains as it should, and lies in evaluations. They are done again by others, it is quarantined, and no
loss that it made counts. Each node belongs to somebody else."""

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


@pytest.mark.parametrize("stages", [[3], [2, 2]])
def test_honest_evaluations_that_are_all_done_again_come_to_the_same_bits(tmp_path: Path, stages: list[int]) -> None:
    with audited(tmp_path, "", stages, HONEST[: sum(stages)], evaluate_every=1) as cluster:
        assert cluster.finish() == 0
        audits = [audit for audit in cluster.of("work_audited") if audit["why"] == "evaluation"]
        assert len(audits) == STEPS * sum(stages)
        assert all(audit["clean"] and audit["errors"] == {"evaluations": 0} for audit in audits)
        assert not cluster.of("node_quarantined")
        assert not cluster.of("step_aborted")
        are_those_of_one_process(cluster, since=1)


@pytest.mark.parametrize(
    ("twist", "stages", "honest"), [("lies_in_evaluations", [3], "ab"), ("misevaluates", [3, 1], "abc")]
)
def test_who_lies_in_evaluations_is_found_before_its_first_one_counts(
    tmp_path: Path, twist: str, stages: list[int], honest: str
) -> None:
    """The planner puts it on the stage with three replicas. What it has trained stays."""
    with audited(tmp_path, twist, stages, (*honest, LIAR), evaluate_every=1) as cluster:
        assert cluster.finish() == 0
        found = [(event["node"], event["charge"], event["undecided"]) for event in cluster.of("node_quarantined")]
        assert found == [(LIAR, "AUDIT", False)]
        assert [(e["step"], e["problem"]) for e in cluster.of("step_aborted")] == [(2, "SETTLED")]
        assert not cluster.of("rolled_back")
        are_those_of_one_process(cluster, since=2)


def test_who_lies_in_the_last_evaluation_alone_is_found_as_well(tmp_path: Path) -> None:
    """No step follows, but one that is only voted on. The others evaluate again, unless the checkpoint was whole before: then the
    run is over."""
    with audited(tmp_path, "lies_in_evaluations", [3], (*HONEST[:2], LIAR), evaluate_every=0) as cluster:
        assert cluster.finish() == 0
        found = [(event["node"], event["charge"], event["undecided"]) for event in cluster.of("node_quarantined")]
        assert found == [(LIAR, "AUDIT", False)]
        assert [(e["step"], e["problem"]) for e in cluster.of("step_aborted")] == [(STEPS + 1, "SETTLED")]
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)
        last = held_out_losses_alone(cluster.run_file, STEPS)[-1]
        evaluated = [(event["step"], event["loss"]) for event in cluster.of("evaluated")]
        assert evaluated in ([], [(STEPS, pytest.approx(last, rel=1e-9))])


def test_who_dies_in_the_last_evaluation_does_not_keep_the_others_waiting_for_it(tmp_path: Path) -> None:
    """It is on the first stage, so that others wait for what it would send. They evaluate again if it had not written its part of
    the checkpoint."""
    with audited(tmp_path, "dies_at_the_end", [2, 2], (LIAR, "x", "y", "z"), evaluate_every=0) as cluster:
        assert cluster.finish() == 0
        assert not cluster.of("node_quarantined")
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)
        last = held_out_losses_alone(cluster.run_file, STEPS)[-1]
        evaluated = [(event["step"], event["loss"]) for event in cluster.of("evaluated")]
        assert evaluated in ([], [(STEPS, pytest.approx(last, rel=1e-9))])
