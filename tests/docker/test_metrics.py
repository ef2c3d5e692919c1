"""Prometheus takes the rules of docker/metrics, each fires when it should, and the board and the rules name what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.coordinator.view.test_metrics import figures_of
from tests.coordinator.web.stored_run import stored_run

ROOT = Path(__file__).parents[2]
METRICS = ROOT / "docker" / "metrics"


def promtool(*arguments: str, folder: Path) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("needs Prometheus: apt-get install prometheus")
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_board_and_the_rules_name_metrics_that_there_are() -> None:
    there = {sample.name for family in figures_of(stored_run()).collect() for sample in family.samples}
    for name in ("board.json", "alerts.yaml"):
        named = set(re.findall(r"\b(?:dtfm|process)_\w+", (METRICS / name).read_text()))
        assert len(named) > 5
        assert named <= there, f"{name}: {named - there}"


def test_prometheus_takes_the_configuration_with_the_rules() -> None:
    assert "6 rules found" in promtool("check", "config", "prometheus.yaml", folder=METRICS)


def test_the_documents_name_each_alert() -> None:
    rules = yaml.safe_load((METRICS / "alerts.yaml").read_text())["groups"][0]["rules"]
    documented = re.findall(r"^\| `(Dtfm\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert documented == [rule["alert"] for rule in rules]


GOOD = {
    'up{job="dtfm"}': "1x180",
    'up{job="dtfm",instance="reserve"}': "0x180",
    "dtfm_run_stalled": "0x180",
    'dtfm_node_joins_total{node="a"}': "7x180",
    "dtfm_disk_bytes": "1000x180",
    "dtfm_disk_free_bytes": "250x180",
    "dtfm_reserves": "1x180",
    "dtfm_step_seconds": "12x180",
    "dtfm_step_predicted_seconds": "10x180",
}
"""A series of each kind over three hours, a value a minute."""


@pytest.mark.parametrize(
    ("alert", "bad"),
    [
        ("", {}),
        ("DtfmCoordinatorGone", {'up{job="dtfm"}': "1x175 0x5"}),
        ("DtfmNoCommit", {"dtfm_run_stalled": "0x179 1"}),
        ("DtfmNodeFlapping", {'dtfm_node_joins_total{node="a"}': "7x150 8x5 9x5 10x5 11x15"}),
        ("DtfmDiskFilling", {"dtfm_disk_free_bytes": "40x180"}),
        ("DtfmDiskFilling", {"dtfm_disk_free_bytes": "290-1x180"}),
        ("DtfmReserveMissing", {"dtfm_reserves": "1x160 0x20"}),
        ("DtfmPredictionOff", {"dtfm_step_seconds": "16x180"}),
        ("DtfmPredictionOff", {"dtfm_step_seconds": "6x180"}),
    ],
)
def test_an_alert_fires_for_what_it_is_for_and_for_nothing_else(
    alert: str, bad: dict[str, str], tmp_path: Path
) -> None:
    rules = yaml.safe_load((METRICS / "alerts.yaml").read_text())["groups"][0]["rules"]
    # By promtool the value of an alert is in its labels and annotations only, which are not what is tested here.
    for rule in rules:
        rule["annotations"] = {}
    (tmp_path / "alerts.yaml").write_text(json.dumps({"groups": [{"name": "dtfm", "rules": rules}]}))
    series = [{"series": name, "values": values} for name, values in (GOOD | bad).items()]
    labels: dict[str, Any] = {"DtfmNodeFlapping": {"node": "a"}}
    expected = [
        {"eval_time": "3h", "alertname": name, "exp_alerts": [{"exp_labels": labels.get(name, {})}] * (name == alert)}
        for name in (rule["alert"] for rule in rules)
    ]
    tests = {
        "rule_files": ["alerts.yaml"],
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": expected}],
    }
    (tmp_path / "tests.yaml").write_text(json.dumps(tests))
    promtool("test", "rules", "tests.yaml", folder=tmp_path)
