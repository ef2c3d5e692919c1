"""A node gives tensors of one shape each other's names in the checkpoints that it writes."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.attacks.test_the_run_goes_on import LIAR, twisted
from tests.attacks.twisted import PEERS
from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file


def test_such_checkpoints_do_not_become_whole_and_the_others_write_the_next(tmp_path: Path) -> None:
    """The last checkpoint can be exported."""
    text = run_file(model=GPT2, stages=[3], steps=10, checkpoint_every=2, lease=2.0, precision="fp32")
    place = partial(twisted, "renames")
    with Cluster(tmp_path, text, place=place, nodes=(*PEERS, LIAR), invited=True, liars=True) as cluster:
        assert cluster.finish() == 0
        assert not cluster.of("node_quarantined")
    failed = cluster.of("checkpoint_failed")
    # It may also be overtaken by the next.
    assert any("does not have the tensors that the run's model has" in event["reason"] for event in failed)
    assert cluster.of("checkpoint_written")[-1]["step"] == 10
    export = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", cluster.store, str(tmp_path / "model")]
    subprocess.run(export, check=True, timeout=60)
    assert cluster.losses[-1] == pytest.approx(losses_alone(cluster.run_file)[-1], rel=1e-4)
