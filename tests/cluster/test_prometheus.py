"""Debian's Prometheus, with the files of docker/metrics, at a coordinator under training."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.launch import Cluster
from tests.cluster.ports import free_port
from tests.cluster.runs import GPT2, run_file

METRICS = Path(__file__).parents[2] / "docker" / "metrics"


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Callable[[str, Callable[[Any], object]], Any]]:
    """Prometheus that asks ``target`` each second. Yields a function that returns what it answers to a path of its API, once that
    is as wanted."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs Prometheus: apt-get install prometheus")
    config = yaml.safe_load((METRICS / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(METRICS / "alerts.yaml")]
    job = config["scrape_configs"][0]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    at = f"127.0.0.1:{free_port()}"
    command = [program, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address={at}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def answer(path: str, wanted: Callable[[Any], object]) -> Any:
        deadline = time.monotonic() + 60
        got: Any = None
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{at}/api/v1/{path}", timeout=10) as reply:
                    got = json.load(reply)["data"]
                if wanted(got):
                    return got
            except OSError:
                pass  # it has not begun to listen
            time.sleep(0.1)  # Prometheus can only be asked: without this, a core does nothing else
        raise AssertionError(f"{path}: {got}\n{(folder / 'prometheus.log').read_text()[-2000:]}")

    try:
        yield answer
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.soak
def test_prometheus_sees_a_run_train_and_alerts_once_it_stands_still(tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    text = run_file(model=GPT2, stages=[1], steps=100_000, learning_rate=1e-3, lease=0.5)
    with Cluster(tmp_path, text, start=False) as cluster:
        cluster.start_coordinator("--no-page", "--metrics", at)
        node = cluster.add("a")
        cluster.wait_for("step_committed")
        with prometheus(tmp_path, at) as answer:

            def value(query: str, wanted: Callable[[float], bool]) -> None:
                answer(f"query?query={query}", lambda got: any(wanted(float(r["value"][1])) for r in got["result"]))

            value("dtfm_step", lambda step: step > 1)
            value("rate(dtfm_node_micro_batches_total[10s])", lambda rate: rate > 0)
            value("dtfm_node_busy_seconds", lambda seconds: seconds > 0)
            targets = answer("targets", lambda _: True)["activeTargets"]
            assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")]
            node.send(signal.SIGKILL)

            def firing(got: Any) -> list[str]:  # this machine's disk may be about to fire
                return [each["labels"]["alertname"] for each in got["alerts"] if each["state"] == "firing"]

            assert firing(answer("alerts", firing)) == ["DtfmNoCommit"]
