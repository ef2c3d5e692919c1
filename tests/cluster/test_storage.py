"""Storage that a node does not share with the coordinator is found before step 1. Where it is gone at the end, an operator names
another place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, run_file
from tests.cluster.test_life_cycle import command


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_machine_that_lacks_the_coordinators_folder_is_told_so_and_the_others_train(tmp_path: Path) -> None:
    """The stranger's machine has another folder at that path, as in a mount namespace of its own."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "other").mkdir()
    mount = f"mount --bind {tmp_path}/other {tmp_path}/shared && exec "

    def place(name: str, command: list[str]) -> list[str]:
        if name != "stranger":
            return command
        quoted = " ".join(f"'{part}'" for part in command)
        return ["unshare", "--mount", "sh", "-c", mount + quoted]

    text = run_file(model=GPT2, stages=[1, 1], steps=4, storage=f"{tmp_path}/shared")
    with Cluster(tmp_path, text, place=place, fresh=["stranger"]) as cluster:
        stranger = cluster.add("stranger")
        assert stranger.wait(60) == 2
        assert "is not the same place on this machine as on the coordinator's" in stranger.errors
        assert "leave checkpoint.uri out of the run file" in stranger.errors
        for name in "ab":
            cluster.add(name)
        assert cluster.finish() == 0
    assert (tmp_path / "shared/step-00000004/manifest.json").exists()


def test_a_run_whose_storage_is_gone_at_the_end_waits_until_an_operator_names_another_place(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    text = run_file(model=GPT2, stages=[1, 1], steps=6, storage=f"{tmp_path}/gone")
    with Cluster(tmp_path, text, nodes="ab") as cluster:
        cluster.wait_for("step_committed")
        shutil.rmtree(tmp_path / "gone")
        (tmp_path / "gone").write_text("a file, below which nothing can be written")
        failed = cluster.wait_for("checkpoint_failed")
        assert "Not a directory" in failed["reason"]
        assert "set checkpoint.uri to file:" in command(cluster, "set", f"checkpoint.uri={tmp_path}/other")["sentence"]
        assert cluster.finish() == 0
        assert {node.wait(20) for node in cluster.nodes.values()} == {0}
    assert [e["folder"] for e in cluster.of("checkpoint_written")] == [f"file://{tmp_path}/other/step-00000006"]
    assert not cluster.of("node_quarantined")
