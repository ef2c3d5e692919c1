"""Two of six strangers turn the sign of their gradients, and find each other's work right. They begin on one stage, with one
honest node. No wrong step counts, no honest node goes, and the two have no part at the end: three others contradict them, or
one believed node does, or plans keep them apart from every other node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.twisted import FRIENDS
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file

STEPS = 10

HONEST = "wxyz"
"""The planner gives the stages to equal nodes in the order of their names."""


def colluding(folder: Path, believed: str) -> Cluster:
    def place(name: str, command: list[str]) -> list[str]:
        at = command.index("dtfm.node.cli") if name in FRIENDS else 0
        return [*command[:at], "tests.attacks.twisted", "flips+covers", *command[at + 1 :]] if at else command

    names = (*HONEST, *FRIENDS)
    text = run_file(model=GPT2, stages=[3, 3], steps=STEPS, lease=2.0)
    return Cluster(
        folder,
        f'{text}[trust]\nmode = "open"\naudit_rate = 1\n',
        place=place,
        nodes=names,
        invited={*names} - {*believed},
        liars=True,
    )


@pytest.mark.soak
@pytest.mark.parametrize("believed", ["", "w", "z"])
def test_two_of_three_replicas_who_lie_for_each_other_lose(tmp_path: Path, believed: str) -> None:
    with colluding(tmp_path, believed) as cluster:
        assert cluster.finish() == 0
        first = cluster.of("plan_adopted")[0]["plan"]["stages"]
        assert any({*FRIENDS} <= {*stage["replicas"]} for stage in first)
        assert {event["node"] for event in cluster.of("node_quarantined")} <= {*FRIENDS}
        assert all({*FRIENDS}.intersection(event["nodes"]) for event in cluster.of("suspected"))
        commits = {event["step"]: event for event in cluster.of("step_committed")}
        losses = [commits[step]["loss"] for step in range(1, STEPS + 1)]
        # An honest gradient may be clipped, which changes the seventh digit. One turned sign changes the third.
        assert losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-5)
        at_work = {*commits[STEPS]["compute_seconds"]}
        assert at_work <= {*HONEST}
        assert len(at_work) >= 3, "whoever is idle is so because no faster plan uses it"
