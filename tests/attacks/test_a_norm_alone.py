"""A stranger that is alone in its stage says that its gradients are huge. All gradients are clipped by the norm of the whole
model: so nobody would learn anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.test_the_run_goes_on import LIAR, twisted
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file

STEPS = 40


def lied_to(folder: Path, *nodes: str) -> Cluster:
    """An open run that audits all work, with the second node alone in the second stage."""
    text = run_file(model=GPT2, stages=[len(nodes) - 1, 1], steps=STEPS, lease=4.0)
    return Cluster(
        folder,
        f'{text}[trust]\nmode = "open"\naudit_rate = 1\n',
        coordinator="tests.cluster.alike",
        place=lambda name, command: twisted("huge_norm", name, command),
        nodes=nodes,
        invited=True,
        liars=True,
    )


@pytest.mark.soak
def test_where_nobody_else_is_there_for_its_stage_the_other_stage_learns_all_the_same(tmp_path: Path) -> None:
    with lied_to(tmp_path, "a", LIAR) as cluster:
        assert cluster.finish(timeout=300) == 0
        assert len(cluster.of("stage_bounded")) == STEPS
        honest = losses_alone(cluster.run_file)
        norms = [event["gradient_norm"] for event in cluster.of("step_committed")]
        assert max(norms) < 100
        assert cluster.losses[0] == pytest.approx(honest[0], rel=1e-9)
        assert cluster.losses[-1] < cluster.losses[0] - 0.3 * (honest[0] - honest[-1])
        assert not cluster.of("node_quarantined")


@pytest.mark.soak
def test_the_others_learn_as_ever_and_it_is_alone_no_longer(tmp_path: Path) -> None:
    with lied_to(tmp_path, "a", LIAR, "z") as cluster:
        assert cluster.finish(timeout=300) == 0
        stages = [{*stage["replicas"]} for stage in cluster.of("plan_adopted")[0]["plan"]["stages"]]
        assert {LIAR} in stages, "this test needs it alone"
        (bounded, *more) = cluster.of("stage_bounded")
        assert (bounded["step"], bounded["nodes"], bounded["norm"]) == (1, [LIAR], 1e12)
        assert all(event["nodes"] == [LIAR] for event in more)
        last = max(event["step"] for event in cluster.of("stage_bounded"))
        assert last < STEPS / 2, "from then on others say the norm of its stage, too"
        assert {event["node"] for event in cluster.of("node_quarantined")} <= {LIAR}
        honest = losses_alone(cluster.run_file)
        assert cluster.losses[-1] <= 1.02 * honest[-1]
