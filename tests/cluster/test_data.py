"""How nodes get the data: newcomers without reading the source, and a large source while the run trains."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cluster.launch import Cluster
from tests.cluster.runs import CORPUS, GPT2, losses_alone, run_file


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


@pytest.mark.soak
def test_a_source_read_in_chapters_trains_as_in_one_process_through_a_join_and_a_kill(tmp_path: Path) -> None:
    source = tmp_path / "large.jsonl"
    source.write_text("".join(f"{json.dumps({'text': f'line {n}, {n * 7919} or so'})}\n" for n in range(800)))
    text = run_file(model=GPT2, stages=[2], steps=30, source=str(source))
    text = text.replace("[data]\n", "[data]\nchapter_bytes = 8000\n")  # some nine steps
    with Cluster(tmp_path, text, nodes="ab") as cluster:
        cluster.wait_for("step_committed", where=lambda e: e["step"] >= 5)
        cluster.add("c")
        cluster.wait_for("node_ready", where=lambda e: e["node"] == "c")
        cluster.nodes["a"].send(signal.SIGKILL)
        assert cluster.finish() == 0
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9, abs=0)
    assert all(event["samples"] == 20 for event in cluster.of("step_committed"))
