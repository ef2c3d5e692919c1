"""Machines that share no disk, one of them behind NAT, train; one dies for good; the model ends on the coordinator's disk."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, held_out_loss, run_file
from tests.wan.internet import Internet

pytestmark = [pytest.mark.usefixtures("internet", "nothing_left_running")]


@pytest.mark.soak
def test_the_model_comes_home(tmp_path: Path) -> None:
    runs = tmp_path / "dtfm-runs"
    runs.mkdir()
    with Internet() as net:
        address = net.host("coordinator")
        net.router("home")
        for name, home in (("a", ""), ("b", "home"), ("c", "")):
            net.host(name, behind=home)

        def place(name: str, command: list[str]) -> list[str]:
            if name == "coordinator":
                return net.inside(name, command)
            own = f"mount -t tmpfs none {runs} && exec {shlex.join(command)}"  # nothing of the coordinator's
            return net.inside(name, ["unshare", "--mount", "sh", "-c", own])

        toml = run_file(
            model=GPT2, stages=[1, 1], steps=30, checkpoint_every=10, precision="fp32", storage="coordinator:"
        )
        where = f"{address}:7400"
        with Cluster(tmp_path, toml, address=where, place=place, invited=True, fresh="abc") as cluster:
            for name in "abc":
                cluster.add(name, "--no-open-port")
            cluster.wait_for("checkpoint_written")
            cluster.nodes["b"].send(signal.SIGKILL)
            assert cluster.finish(150) == 0
    command = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", cluster.store]
    subprocess.run([*command, str(tmp_path / "model")], check=True, timeout=60)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    evaluated = cluster.of("evaluated")[-1]
    assert evaluated["step"] == 30
    assert held_out_loss(cluster.run_file, model, evaluated["samples"]) == pytest.approx(evaluated["loss"], rel=1e-6)
