"""The log is in a PostgreSQL: the coordinator may be killed, and the database may go away, and no step is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import postgres
from tests.cluster.exact import assert_exact
from tests.cluster.faults import COORDINATOR, SIGKILL, Phase, announcement, fail
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, run_file


@pytest.mark.soak
def test_killed_and_restarted_by_the_same_command_and_without_its_database_for_a_while_it_loses_no_step(
    tmp_path: Path,
) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=100_000, lease=3.0)
    death = fail(COORDINATOR).at(step=5, phase=Phase.COMMIT).by(SIGKILL)
    url = postgres.database(tmp_path)
    with Cluster(tmp_path, text, store=url, faults=[death], nodes="ab") as cluster:
        assert cluster.coordinator is not None
        cluster.coordinator.wait_for_error(announcement(death))
        cluster.coordinator.wait(10)
        before = len(cluster.events)
        cluster.start_coordinator()
        step = cluster.wait_for("step_committed", after=before)["step"]
        postgres.server().stop()
        try:
            cluster.coordinator.wait_for_error("the run stands still until the log can be written")
        finally:
            postgres.server().start()
        step = cluster.wait_for("step_committed", where=lambda e: e["step"] > step + 20)["step"]
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        postgres.server().stop()
        try:
            cluster.coordinator = cluster.start_another(cluster.address)
            cluster.coordinator.wait_for_error("The run waits, and then goes on by itself")
        finally:
            postgres.server().start()
        cluster.wait_for("step_committed", where=lambda e: e["step"] > step + 20)
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
        assert not cluster.of("rolled_back")
        assert not cluster.of("node_left")
    assert_exact(cluster)
