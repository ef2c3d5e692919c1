"""A newcomer takes its place without reading the data's source."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.launch import Cluster
from tests.cluster.runs import CORPUS, GPT2, run_file


def test_a_newcomer_fetches_the_tokens_that_two_others_agree_on(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=10_000, checkpoint_every=0)
    with Cluster(tmp_path, text, nodes="ab", invited=True) as cluster:
        cluster.wait_for("data_confirmed")
        cluster.wait_for("step_committed")
        publisher = next(node for node in cluster.nodes.values() if "layers 0-" in node.errors)
        publisher.wait_for_error("tokens are in")
        (tmp_path / CORPUS).unlink()
        cluster.add("c", environment={"XDG_CACHE_HOME": str(tmp_path / "cache-of-c")})
        cluster.wait_for("node_ready", where=lambda e: e["node"] == "c")
        publisher.close()  # the newcomer has its place soon, first or last
        adopted = cluster.wait_for(
            "plan_adopted", where=lambda e: any("c" in s["replicas"] for s in e["plan"]["stages"])
        )
        cluster.wait_for("step_committed", where=lambda e: e["generation"] >= adopted["generation"])
        assert len(list((tmp_path / "cache-of-c").rglob("*.tokens"))) == 1
