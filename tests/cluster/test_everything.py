"""One run with everything in it: two deaths, a return, a newcomer, and the coordinator's death between the last commit and the
checkpoint. Its losses equal one process's, and no step is trained again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.exact import assert_exact
from tests.cluster.faults import COORDINATOR, HOLD, SIGKILL, Phase, announcement, fail
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, run_file

STEPS = 60
NODES = ("a", "b", "c", "d", "e", "f")
FIRST_DEATH = fail("b").at(step=8, phase=Phase.BACKWARD).by(SIGKILL)
UNTIL_THE_RETURN = fail("a").at(step=14, phase=Phase.VOTE).by(HOLD)
SECOND_DEATH = fail("e").at(step=28, phase=Phase.VOTE).by(SIGKILL)
UNTIL_THE_NEWCOMER = fail("a").at(step=34, phase=Phase.VOTE).by(HOLD)
COORDINATORS_DEATH = fail(COORDINATOR).at(step=STEPS, phase=Phase.COMMIT).by(SIGKILL)
FAULTS = (FIRST_DEATH, UNTIL_THE_RETURN, SECOND_DEATH, UNTIL_THE_NEWCOMER, COORDINATORS_DEATH)


@pytest.mark.soak
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-8), ("fp32", 1e-3)])
def test_deaths_a_return_a_newcomer_and_the_coordinators_death(
    tmp_path: Path, precision: str, tolerance: float
) -> None:
    text = run_file(model=GPT2, stages=[2, 2, 2], steps=STEPS, learning_rate=1e-3, precision=precision)
    with Cluster(tmp_path, text, faults=FAULTS, nodes=NODES) as cluster:
        for death, next_node, hold in (
            (FIRST_DEATH, "b", UNTIL_THE_RETURN),
            (SECOND_DEATH, "late", UNTIL_THE_NEWCOMER),
        ):
            left = cluster.wait_for("node_left", where=lambda e, death=death: e["node"] == death.process)  # type: ignore[misc]
            cluster.add(next_node)
            cluster.wait_for("node_ready", after=cluster.events.index(left))
            cluster.let_go(hold)
        assert cluster.coordinator is not None
        cluster.coordinator.wait_for_error(announcement(COORDINATORS_DEATH))
        cluster.coordinator.wait(10)
        cluster.start_coordinator()
        assert cluster.finish() == 0
    log = cluster.log()
    committed = [e for e in log if e["event"] == "step_committed"]
    assert [e["step"] for e in committed] == list(range(1, STEPS + 1))
    assert [e["event"] for e in log if e["event"] in ("rolled_back", "run_finished")] == ["run_finished"]
    assert [e["step"] for e in log if e["event"] == "checkpoint_written"] == [STEPS]
    workers = {node for e in committed for node in e["compute_seconds"]}
    assert workers == {*NODES, "late"}
    assert committed[-1]["compute_seconds"].keys() == {"a", "b", "c", "d", "f", "late"}
    assert_exact(cluster, tolerance)
