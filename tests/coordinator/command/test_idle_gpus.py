"""What would put idle GPUs to use: `command/idle_gpus.py`, and what `plan` prints of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtfm.coordinator.command.idle_gpus import Advice, advice, changed, describe_advice
from dtfm.coordinator.command.rented import parse_gpus, rented_cluster
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.schedule import schedule
from tests.coordinator.command.test_commands import run
from tests.scheduler.dumps import dump_workload
from tests.scheduler.llama import TOKENS, llama

Capture = pytest.CaptureFixture[str]
GPUS = rented_cluster(parse_gpus("3x RTX 4090"), 62.5e6, 0.04, 32 * 2**30, "bf16")
WORK = llama("1.1B", micro_batches=8)
NOW = schedule(GPUS, WORK, time_used=lambda: 1.0)


def answer(idle: int, seconds: float) -> Decision:
    plan = replace(NOW.plan, idle=GPUS.ids[:idle])
    return replace(NOW, plan=plan, predicted=replace(NOW.predicted, iteration_seconds=seconds))


def asked(answers: dict[str, Decision]) -> tuple[list[Advice], list[str]]:
    """The advice, and the questions in their order. What has no answer is infeasible."""
    questions = []

    def ask(words: str, _cluster: Cluster, _workload: Workload) -> Decision:
        questions.append(words)
        if words not in answers:
            raise Infeasible("too large")
        return answers[words]

    return list(advice(GPUS, WORK, answer(2, 10.0), ask, lambda: False)), questions


def test_the_smallest_change_that_helps_is_named_and_no_larger_one_is_tried() -> None:
    found, questions = asked({"lines twice as fast": answer(0, 5.0)})
    assert found == [Advice("lines twice as fast", 0, 5.0, 2.0)]
    assert "lines ten times as fast" not in questions


def test_a_change_helps_if_fewer_are_idle_and_more_is_computed() -> None:
    """A batch twice as large that takes twice as long computes no more."""
    found, _ = asked(
        {
            "lines twice as fast": answer(2, 5.0),
            "lines ten times as fast": answer(1, 5.0),
            "a batch twice as large": answer(0, 19.5),
            "a batch four times as large": answer(0, 39.0),
        }
    )
    assert found == [Advice("lines ten times as fast", 1, 5.0, 2.0), Advice("a batch four times as large")]


def test_what_does_not_fit_is_not_advised() -> None:
    assert asked({})[0] == []


def test_nothing_more_is_said_after_ctrl_c() -> None:
    assert not list(advice(GPUS, WORK, answer(2, 10.0), lambda *_: answer(0, 1.0), lambda: True))


def test_changes_are_what_they_say() -> None:
    faster, same = changed("lines", GPUS, WORK, 10)
    assert same is WORK
    assert np.array_equal(faster.bandwidth, 10 * GPUS.bandwidth)
    assert {(node.up, node.down) for node in faster.nodes} == {(625e6, 625e6)}
    assert np.array_equal(faster.latency, GPUS.latency)
    assert changed("batch", GPUS, WORK, 4)[1].micro_batches == 4 * WORK.micro_batches
    deeper = changed("layers", GPUS, WORK, 2)[1].layers
    assert [layer.name for layer in deeper] == ["embedding", *["decoder"] * 44, "head"]


def test_people_read_what_helps_and_what_does_not() -> None:
    found = [Advice("lines twice as fast", 0, 24.4, 1.47), Advice("a batch four times as large")]
    assert describe_advice(found, 6, 8).splitlines() == [
        "6 of 8 would be idle. What would put more of them to use:",
        "  lines twice as fast: none idle, 1.5 times as much work per second (24.4 s a step)",
        "Not enough for that: a batch four times as large.",
    ]


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "w.json").write_text(dump_workload(WORK, TOKENS))
    return (
        *("plan", "--gpus", "3x RTX 4090", "--links", "100Mbit/s,40ms", "--workload", str(tmp_path / "w.json")),
        *("--deadline", "0.2"),
    )


def test_plan_says_what_would_put_idle_gpus_to_use(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert run(monkeypatch, *arguments, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["idle"]
    helps = next(each for each in document["advice"] if each["words"] == "lines ten times as fast")
    assert helps["idle"] < len(document["plan"]["idle"])
    assert helps["gain"] >= 1.05
    assert run(monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    assert "of 3 would be idle. What would put more of them to use:\n  lines ten times as fast: " in printed


def test_where_all_work_nothing_else_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    (tmp_path / "w.json").write_text(dump_workload(llama("7B"), TOKENS))
    options = "--gpus", "3x RTX 4090", "--links", "500Mbit/s,40ms", "--workload", str(tmp_path / "w.json")
    assert run(monkeypatch, "plan", *options, "--deadline", "0.2") == 0
    assert "idle" not in capsys.readouterr().out
