"""Each of several strangers trains a copy of the model by itself, and one of them lies. Others repeat its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.attacks.test_the_run_goes_on import LIAR, has_part, twisted
from tests.cluster.launch import Cluster
from tests.cluster.test_islands import ROUNDS, assert_exact_islands, islands, text

STEPS = 3 * (ROUNDS + 1)


def strangers(folder: Path, twist: str, names: Sequence[str], steps: int = STEPS) -> Cluster:
    return Cluster(
        folder,
        f'{text(steps, nodes=names)}[trust]\nmode = "open"\naudit_rate = 1\n',
        coordinator="tests.cluster.drawn",
        place=lambda name, command: twisted(twist, name, command),
        nodes=names,
        invited=True,
        liars=LIAR in names,
    )


@pytest.mark.soak
@pytest.mark.parametrize("names", [("a", "b", "c"), ("ar1", "ar2", "b", "c")])
def test_honest_strangers_whose_rounds_are_all_done_again_train_what_one_process_does(
    tmp_path: Path, names: Sequence[str]
) -> None:
    with strangers(tmp_path, "", names) as cluster:
        assert cluster.finish() == 0
        assert len(islands(cluster)) == 3
        assert_exact_islands(cluster)
        audits = cluster.of("work_audited")
        of_rounds = {audit["node"] for audit in audits if audit["step"] % (ROUNDS + 1) == 0}
        assert of_rounds == {name for name in names if "r" not in name}
        assert {audit["node"] for audit in audits} == {*names}, "replicas audit each other in each step"
        assert all(audit["clean"] and not any(audit["errors"].values()) for audit in audits)
        assert not cluster.of("suspected")
        assert not cluster.of("step_aborted")


@pytest.mark.soak
@pytest.mark.parametrize(
    "twist", ["flips", "mislabels", "learns_too_fast", "adds_up_wrong", "accuses", "flips_and_withholds"]
)
def test_who_is_an_island_alone_and_lies_is_found_and_nothing_wrong_counts(tmp_path: Path, twist: str) -> None:
    """Its labels, its updates, its changes, its sums, or about others' rounds."""
    with strangers(tmp_path, twist, ("a", "b", "c", LIAR)) as cluster:
        assert cluster.finish() == 0
        assert cluster.of("suspected")
        assert all(LIAR in event["nodes"] for event in cluster.of("suspected"))
        assert {event["node"] for event in cluster.of("node_quarantined")} == {LIAR}
        assert not has_part(LIAR, cluster.of("step_committed")[-1])
        if twist != "adds_up_wrong":  # of which one is drawn
            assert_exact_islands(cluster, rolled_back=len(cluster.of("rolled_back")))
