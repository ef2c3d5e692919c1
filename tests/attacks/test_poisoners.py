"""One of several strangers does its work wrong, or lies in audits. Others repeat its work, no wrong step counts, plans keep it
apart from all, and the others finish. Each node belongs to somebody else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.attacks.test_the_run_goes_on import LIAR, STEPS, has_part, twisted
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


@pytest.mark.parametrize("stages", [pytest.param([3], marks=pytest.mark.soak), [2, 2]])
def test_an_honest_run_in_which_all_work_is_done_again_has_the_losses_of_one_process(
    tmp_path: Path, stages: list[int]
) -> None:
    with audited(tmp_path, "", stages, HONEST[: sum(stages)]) as cluster:
        assert cluster.finish() == 0
        audits = cluster.of("work_audited")
        assert len(audits) == STEPS * sum(stages)
        assert all(audit["clean"] and not any(audit["errors"].values()) for audit in audits)
        assert not cluster.of("node_quarantined")
        assert not cluster.of("step_aborted")
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)


def nothing_wrong_counts(cluster: Cluster) -> None:
    """All suspicions fall on the liar."""
    assert cluster.finish() == 0
    suspected = cluster.of("suspected")
    assert suspected
    assert all(LIAR in event["nodes"] for event in suspected)
    assert {event["node"] for event in cluster.of("node_quarantined")} <= {LIAR}
    clipped = {node for event in cluster.of("gradients_clipped") for nodes in event["times"].values() for node in nodes}
    assert clipped <= {LIAR}
    assert len(cluster.losses) == STEPS
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)


def sentences(cluster: Cluster) -> list[tuple[str, str, bool]]:
    return [(event["node"], event["charge"], event["undecided"]) for event in cluster.of("node_quarantined")]


@pytest.mark.soak
@pytest.mark.parametrize(
    "twist",
    ["adds_too_much", "flips", "exaggerates", "adds_noise", "flatters", "mislabels", "accuses"],
)
@pytest.mark.parametrize("names", [(*HONEST[:2], LIAR), (LIAR, *HONEST[:2])])
def test_of_three_replicas_two_go_on_without_the_one_that_lies(
    tmp_path: Path, twist: str, names: tuple[str, ...]
) -> None:
    """Two that agree may be one person: among strangers they do not throw out the third, but nobody works with it any more."""
    with audited(tmp_path, twist, [3], names) as cluster:
        nothing_wrong_counts(cluster)
        assert not has_part(LIAR, cluster.of("step_committed")[-1])
        assert len(cluster.of("step_aborted")) <= 2


@pytest.mark.soak
@pytest.mark.parametrize("twist", ["adds_too_much", "accuses"])
def test_one_of_four_replicas_that_lies_is_quarantined_as_three_contradict_it(tmp_path: Path, twist: str) -> None:
    with audited(tmp_path, twist, [4], (*HONEST[:3], LIAR)) as cluster:
        nothing_wrong_counts(cluster)
        assert sentences(cluster) == [(LIAR, "AUDIT", False)]


@pytest.mark.soak
def test_who_makes_wrong_sums_is_found_once_one_of_them_is_drawn(tmp_path: Path) -> None:
    """An audit has one sum of one bucket done again, so that wrong ones may be committed before, and stay."""
    with audited(tmp_path, "adds_up_wrong", [3], (*HONEST[:2], LIAR)) as cluster:
        assert cluster.finish() == 0
        assert all(LIAR in event["nodes"] for event in cluster.of("suspected"))
        assert not has_part(LIAR, cluster.of("step_committed")[-1])
        assert len(cluster.losses) == STEPS


@pytest.mark.soak
@pytest.mark.parametrize(
    ("twist", "stages", "honest"),
    [
        ("biased_forward", [3, 1], "abc"),
        ("sends_zeros", [3, 1], "abc"),
        ("repeats", [3, 1], "abc"),
        ("biased_back", [1, 3], "xyz"),
    ],
)
def test_who_passes_wrong_tensors_to_the_next_stage_or_the_one_before_is_found(
    tmp_path: Path, twist: str, stages: list[int], honest: str
) -> None:
    """The planner puts it on the stage with three replicas."""
    with audited(tmp_path, twist, stages, (*honest, LIAR)) as cluster:
        nothing_wrong_counts(cluster)


@pytest.mark.soak
def test_who_withholds_what_it_lied_about_is_kept_apart_and_nothing_wrong_counts(tmp_path: Path) -> None:
    with audited(tmp_path, "flips_and_withholds", [3], (*HONEST[:2], LIAR)) as cluster:
        nothing_wrong_counts(cluster)
        assert {event["charge"] for event in cluster.of("suspected")} == {"WITHHELD"}
        assert cluster.of("step_aborted")[0]["problem"] == "UNAUDITED"
