"""A run names a web server in a lender's own network: it gets no request, and the coordinator learns nothing of it."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.cluster.launch import Cluster
from tests.cluster.runs import run_file
from tests.node.data.test_reaching import inner_server


def test_a_run_makes_no_node_call_the_lenders_network(tmp_path: Path) -> None:
    with inner_server() as inner:
        run = run_file(stages=[1], steps=1, model=f'[model]\npretrained = "{inner.url}"')
        run = run.replace("[data]", '[data]\ntokenizer = "bytes"')
        with Cluster(tmp_path, run, invited=True) as cluster:
            wary = cluster.add("v")
            assert wary.wait(60) == 2
            assert f"start the node with --allow-data '{inner.url}'" in wary.errors
            left = cluster.wait_for("node_left")
            assert cluster.coordinator is not None
            cluster.coordinator.send(signal.SIGINT)
            cluster.finish()
    assert (
        left["reason"] == f"goodbye: model.pretrained: {inner.url} cannot be used from this node; its operator sees why"
    )
    assert not inner.asked
