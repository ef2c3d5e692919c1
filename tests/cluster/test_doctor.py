"""`dtfm-node doctor` joins without joining: what `join` would be refused for, it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launch import Cluster, Process
from tests.cluster.runs import CORPUS, GPT2, run_file
from tests.cluster.test_invitations import invite, machine

RUN = run_file(model=GPT2, stages=[1], steps=5000, storage="coordinator:")


def doctor(cluster: Cluster, invitation: str, *options: str, on: str = "lender", **environment: str) -> dict[str, Any]:
    """What it says on the machine ``on``, by check; under "code" its exit code."""
    lines: list[bytes] = []
    process = Process(
        [sys.executable, "-m", "dtfm.node.cli", "doctor", "--device", "cpu", "--json", *options],
        cluster.folder,
        environment={**machine(cluster, on, invitation), **environment},
        on_line=lines.append,
    )
    code = process.wait(100)
    found = {finding["check"]: finding for finding in map(json.loads, lines)}
    return {**found, "code": code}


@pytest.mark.soak
def test_a_dry_join_says_what_join_would_and_uses_no_invitation_up(tmp_path: Path) -> None:
    with Cluster(tmp_path, RUN) as cluster:
        invitation = invite(cluster, "--uses", "1")
        refused = doctor(cluster, invitation, DTFM_ALLOW_DATA="none")
        assert refused["code"] == 1
        assert f"--allow-data '{tmp_path / CORPUS}'" in refused["run"]["finding"]

        sound = doctor(cluster, invitation)
        assert sound["code"] == 0, sound
        assert sound["admission"]["finding"] == "run 'test' would let this machine in"
        assert "a round trip to the coordinator takes" in sound["line"]["finding"]
        assert sound["data and weights"]["finding"].startswith("readable; nobody has prepared the run yet: ")
        assert not cluster.of("enrolled")[1:], "nobody but the operator"

        home = machine(cluster, "lender", invitation)
        line = [sys.executable, "-m", "dtfm.node.cli", "join", "--threads", "1", "--device", "cpu"]
        node = Process([*line, "--give-up-after", "20"], tmp_path, environment=home)
        cluster.wait_for("step_committed")
        node.close()

        stranger = doctor(cluster, invitation, on="other")
        assert "INVITATION_USED_UP" in stranger["admission"]["finding"]
        again = doctor(cluster, "", DTFM_ALLOW_DATA="")
        assert (again["code"], again["admission"]["good"]) == (0, True), "where join would go, with what it would allow"

        (tmp_path / CORPUS).write_text("something else\n" * 2000)
        other = doctor(cluster, invite(cluster), on="third")
        assert other["code"] == 1
        finding = other["data and weights"]["finding"]
        assert finding.startswith(f"join would be refused: DATA_DIFFERS: data.source: {CORPUS} has ")
        assert finding.endswith(" on the others; the first byte that differs is from byte 0 to 4,095")
