"""Texts for the run's prompts, written by real nodes while they train."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.launch import Cluster, Event
from tests.cluster.runs import run_file

PROMPTS = ["def f", "class "]


def is_of(prompt: str, written: Event) -> bool:
    return bool(written["prompt"] == prompt)


@pytest.mark.soak
def test_after_an_evaluation_a_node_continues_the_prompts_while_all_train_on(tmp_path: Path) -> None:
    text = run_file(stages=[2], steps=100_000).replace("[train]", "[train]\nevaluate_every = 5")
    text = text.replace("[data]", f"[data]\nprompts = {PROMPTS}")
    with Cluster(tmp_path, text, nodes="ab") as cluster:
        first, second = (
            cluster.wait_for("text_written", where=partial(is_of, prompt), timeout=200) for prompt in PROMPTS
        )
        assert first["step"] == second["step"]
        assert first["step"] % 5 == 0
        assert first["node"] == second["node"] in "ab"
        assert first["text"]
        assert not first["whole"], "the tokenizer has no token that ends a text"
        written = cluster.events.index(second)
        cluster.wait_for("step_committed", where=lambda e: e["step"] > first["step"], after=written)
        assert not cluster.of("step_aborted")
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish(timeout=500) == 1
