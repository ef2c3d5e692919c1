"""A cloud takes a machine back: a node on it, which has a metadata service at 169.254.169.254, hands its part over and leaves."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.launch import ROOT, Cluster
from tests.cluster.runs import run_file
from tests.node.host.metadata import write_firmware
from tests.wan.internet import Internet

pytestmark = [pytest.mark.usefixtures("internet", "nothing_left_running")]
SERVICE = "169.254.169.254"
STEPS = 4000


@pytest.mark.soak  # in short: tests/node/command/test_taking_part.py
@pytest.mark.parametrize("cloud", ["AWS", "Google Cloud", "Azure"])
def test_a_node_leaves_in_order_when_its_cloud_gives_notice(cloud: str, tmp_path: Path) -> None:
    """Both machines have such a service beside them, but the firmware of one does not say that it is a cloud's."""
    firmware = write_firmware(cloud, tmp_path / "dmi" / "id").parent
    with Internet() as net:
        address = net.host("coordinator")
        asked = {}
        for name in "ab":
            net.host(name)
            subprocess.run(
                net.inside(name, ["ip", "address", "add", f"{SERVICE}/32", "dev", "lo"]), check=True, timeout=20
            )
            service = [sys.executable, "-m", "tests.node.host.metadata", cloud, str(tmp_path), SERVICE, "80"]
            asked[name] = tmp_path / f"asked-{name}"
            with asked[name].open("wb") as said:
                process = net.run(name, service, stdout=said, stderr=said, cwd=ROOT)
            wait = f"until grep -q listening {asked[name]}; do read -t 0.05; done"
            subprocess.run(["bash", "-c", wait], stdin=subprocess.PIPE, check=False, timeout=30)
            assert process.poll() is None, asked[name].read_text()

        def place(name: str, command: list[str]) -> list[str]:
            if name in ("coordinator", "b"):
                return net.inside(name, command)
            # Where Linux shows what the firmware says.
            there = f"mount -t tmpfs none /sys/class && cp -R {firmware} /sys/class/ && exec {shlex.join(command)}"
            return net.inside(name, ["unshare", "--mount", "sh", "-c", there])

        toml = run_file(stages=[1, 1], steps=STEPS, precision="fp32").replace("stages = [1, 1]", "")
        with Cluster(tmp_path, toml, address=f"{address}:7400", place=place, fresh="a", nodes="ab") as cluster:
            cluster.wait_for("step_committed")
            (tmp_path / "notice").touch()
            left = cluster.wait_for("node_left", where=lambda event: bool(event["node"] == "a"))
            assert left["reason"].startswith(f"in order: {cloud} takes this machine back (")
            assert cluster.nodes["a"].wait(30) == 0
            assert f"{cloud} takes this machine back" in cluster.nodes["a"].errors
            cluster.wait_for("step_committed", after=cluster.events.index(left))
            assert [event["node"] for event in cluster.of("node_left")] == ["a"]
    assert SERVICE in asked["a"].read_text()
    assert asked["b"].read_text() == "listening\n"
