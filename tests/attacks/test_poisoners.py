"""One of several strangers does its work wrong, or lies in audits. Its work is done again by others, it is quarantined, and the
others finish. Each node belongs to somebody else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.attacks.test_the_run_goes_on import LIAR, STEPS, twisted
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file

HONEST = ("a", "b", "c", "d", "e")


def audited(
    folder: Path,
    twist: str,
    stages: list[int],
    names: Sequence[str],
    precision: str = "fp64",
    steps: int = STEPS,
    evaluate_every: int = 50,
) -> Cluster:
    text = run_file(model=GPT2, stages=stages, steps=steps, lease=2.0, precision=precision)
    text = text.replace("[train]\n", f"[train]\nevaluate_every = {evaluate_every}\n")
    return Cluster(
        folder,
        f'{text}[trust]\nmode = "open"\naudit_rate = 1\n',
        place=lambda name, command: twisted(twist, name, command),
        nodes=names,
        invited=True,
        liars=LIAR in names,
    )


@pytest.mark.parametrize("stages", [[3], [2, 2]])
def test_an_honest_run_in_which_all_work_is_done_again_has_the_losses_of_one_process(
    tmp_path: Path, stages: list[int]
) -> None:
    with audited(tmp_path, "", stages, HONEST[: sum(stages)]) as cluster:
        assert cluster.finish() == 0
        audits = [audit for audit in cluster.of("work_audited") if audit["why"] == "drawn"]
        assert len(audits) == STEPS * sum(stages)
        assert all(audit["clean"] and not any(audit["errors"].values()) for audit in audits)
        assert not cluster.of("node_quarantined")
        assert not cluster.of("step_aborted")
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)


def the_liar_goes(cluster: Cluster, charge: str) -> None:
    assert cluster.finish() == 0
    found = [(event["node"], event["charge"], event["undecided"]) for event in cluster.of("node_quarantined")]
    assert found == [(LIAR, charge, False)]
    clipped = {node for event in cluster.of("gradients_clipped") for nodes in event["times"].values() for node in nodes}
    assert clipped <= {LIAR}
    assert len(cluster.losses) == STEPS
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)


BETWEEN = pytest.mark.soak
"""Of a lie that is found like another one here, which is as hard to find or harder. test_twists.py has an audit see each."""


@pytest.mark.parametrize(
    "twist",
    [
        "flips",
        pytest.param("exaggerates", marks=BETWEEN),
        pytest.param("adds_noise", marks=BETWEEN),
        "adds_too_much",
        "flatters",
        "mislabels",
        "accuses",
    ],
)
def test_one_of_three_replicas_that_lies_is_found_by_the_two_others(tmp_path: Path, twist: str) -> None:
    with audited(tmp_path, twist, [3], (*HONEST[:2], LIAR)) as cluster:
        the_liar_goes(cluster, "AUDIT")


def test_in_bf16_a_bias_that_is_rounding_between_others_is_found_once_equal_devices_have_shown_that_they_are(
    tmp_path: Path,
) -> None:
    """It lies from the beginning. Its work until then was found right, and stays, but for that since the last audit."""
    steps = 12
    with audited(tmp_path, "adds_too_much", [3], (*HONEST[:2], LIAR), precision="bf16", steps=steps) as cluster:
        assert cluster.finish() == 0
        found = [(event["node"], event["charge"], event["undecided"]) for event in cluster.of("node_quarantined")]
        assert found == [(LIAR, "AUDIT", False)]
        of_the_liar = [audit for audit in cluster.of("work_audited") if audit["node"] == LIAR]
        assert [audit["clean"] for audit in of_the_liar] == [True] * (len(of_the_liar) - 1) + [False]
        assert len(of_the_liar) > 1
        assert cluster.of("step_committed")[-1]["step"] == steps


def test_who_makes_wrong_sums_is_found_once_one_of_them_is_drawn(tmp_path: Path) -> None:
    """An audit has one sum of one bucket done again, so that wrong ones may be committed before, and stay."""
    with audited(tmp_path, "adds_up_wrong", [3], (*HONEST[:2], LIAR)) as cluster:
        assert cluster.finish() == 0
        found = [(event["node"], event["charge"], event["undecided"]) for event in cluster.of("node_quarantined")]
        assert found == [(LIAR, "AUDIT", False)]
        assert len(cluster.losses) == STEPS


@pytest.mark.parametrize(
    ("twist", "stages", "honest"),
    [
        ("biased_forward", [3, 1], "abc"),
        pytest.param("sends_zeros", [3, 1], "abc", marks=BETWEEN),
        pytest.param("repeats", [3, 1], "abc", marks=BETWEEN),
        ("biased_back", [1, 3], "xyz"),
    ],
)
def test_who_passes_wrong_tensors_to_the_next_stage_or_the_one_before_is_found(
    tmp_path: Path, twist: str, stages: list[int], honest: str
) -> None:
    """The planner puts it on the stage with three replicas."""
    with audited(tmp_path, twist, stages, (*honest, LIAR)) as cluster:
        the_liar_goes(cluster, "AUDIT")


def test_who_withholds_what_it_lied_about_is_suspended_and_nothing_of_it_counts(tmp_path: Path) -> None:
    with audited(tmp_path, "flips_and_withholds", [3], (*HONEST[:2], LIAR)) as cluster:
        assert cluster.finish() == 0
        found = [(event["node"], event["charge"], event["undecided"]) for event in cluster.of("node_quarantined")]
        assert found == [(LIAR, "WITHHELD", True)]
        assert [event["problem"] for event in cluster.of("step_aborted")][:2] == ["UNAUDITED"] * 2
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)
