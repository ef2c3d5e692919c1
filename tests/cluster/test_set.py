"""What an operator sets of the optimizer while the run goes on holds from one step on, the same on all nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.faults import COORDINATOR, HOLD, SIGKILL, Phase, fail
from tests.cluster.launch import Cluster
from tests.cluster.plain import losses_of_islands
from tests.cluster.replayed import changes_in, losses_as_logged
from tests.cluster.runs import GPT2, run_at, run_file
from tests.cluster.test_islands import NODES, began_by_step, shares_by_step, text
from tests.cluster.test_life_cycle import command

SETTINGS = ("train.learning_rate=0.003", "train.clip_norm=0.05", "train.weight_decay=2")
HELD = 6


def set_all(cluster: Cluster) -> None:
    for setting in SETTINGS:
        key, _, value = setting.partition("=")
        assert f"set {key} to {float(value)}, from step " in command(cluster, "set", setting)["sentence"]


@pytest.mark.soak
def test_all_nodes_apply_each_step_with_the_same_numbers_through_kills_and_joins(tmp_path: Path) -> None:
    """A node joins. Another dies before it hears of a commit, which the newcomer, its standby, applies. The coordinator dies with
    a commit that is written and not announced."""
    hold = fail("a").at(step=HELD, phase=Phase.FORWARD).by(HOLD)
    faults = [
        hold,
        fail("b").at(step=HELD + 2, phase=Phase.COMMIT).by(SIGKILL),
        fail(COORDINATOR).at(step=HELD + 12, phase=Phase.COMMIT).by(SIGKILL),
    ]
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1, 1], steps=30), faults=faults, nodes="ab") as cluster:
        cluster.wait_for("step_committed", where=lambda event: event["step"] == HELD - 1)
        set_all(cluster)
        cluster.add("c").wait_for_error("are copied as of step")
        cluster.let_go(hold)
        assert cluster.coordinator is not None
        cluster.coordinator.wait(60)
        cluster.start_coordinator()
        assert cluster.finish() == 0
        assert not cluster.of("rolled_back")
    log = cluster.log()
    assert changes_in(log) == {HELD: {"learning_rate": 0.003, "clip_norm": 0.05, "weight_decay": 2.0}}
    committed = [event for event in log if event["event"] == "step_committed"]
    assert [event["step"] for event in committed] == [*range(1, 31)]
    alone = [*losses_as_logged(run_at(cluster.run_file), log)]
    assert [event["loss"] for event in committed] == pytest.approx(alone, rel=1e-9, abs=0)
    assert cluster.check().findings == ()


@pytest.mark.soak
def test_islands_apply_each_round_with_the_same_numbers(tmp_path: Path) -> None:
    hold = fail("c1").at(step=HELD, phase=Phase.FORWARD).by(HOLD)
    with Cluster(tmp_path, text(16), coordinator="tests.cluster.drawn", nodes=NODES, faults=[hold]) as cluster:
        cluster.wait_for("step_committed", where=lambda event: event["step"] == HELD - 1)
        set_all(cluster)
        cluster.let_go(hold)
        assert cluster.finish() == 0
        changes, shares, began = changes_in(cluster.log()), shares_by_step(cluster), began_by_step(cluster)
    assert [*changes] == [9], "the next exchange is step 8"
    run = run_at(cluster.run_file)
    exchanges = {event["step"]: event["exchange"] for event in cluster.of("step_committed")}
    alone = losses_of_islands(run, lambda s: shares[s], exchanges.get, {}, began.__getitem__, changes=changes)
    alone = losses_of_islands(run, lambda s: shares[s], exchanges.get, {}, began.__getitem__, changes=changes)
    for step, loss in enumerate(cluster.losses, 1):
        assert loss == pytest.approx(next(alone), rel=1e-8, abs=0), f"step {step}"
    assert cluster.check().findings == ()
