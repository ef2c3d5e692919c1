"""A node's texts for the run's prompts: what the model writes with the weights after a step, beside all other work."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from dtfm.node.host.work import WORK
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.stage import Stage
from dtfm.node.training import writing
from dtfm.node.training.writing import Pace, Weights, Writing, wait_for, written
from dtfm.protos.control_pb2 import NodeMessage
from dtfm.protos.texts import MOST_TOKENS
from tests.cluster.runs import run_file
from tests.node.in_process import CPU, nodes_of
from tests.published import adapter_run, publish

MOST = 6


@pytest.fixture(autouse=True)
def few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "MOST_TOKENS", MOST)


def judged(stage: Stage, prompt: str) -> str:
    """The likeliest bytes after the prompt, as the stage computes them."""
    ids = list(prompt.encode())
    with torch.no_grad():
        for _ in range(MOST):
            ids.append(int(stage.forward(torch.tensor([ids]))[0, -1].argmax()))
    return bytes(ids[len(prompt) :]).decode(errors="replace")


def weights_of(stage: Stage, step: int) -> Weights:
    return step, {index: flat.clone() for index, flat in stage.weights.items()}


@pytest.mark.parametrize(
    ("family", "weights"), [("", "bf16"), pytest.param("gemma2", "bf16", marks=pytest.mark.soak), ("llama", "nf4")]
)
def test_the_texts_are_what_the_trained_model_writes(tmp_path: Path, family: str, weights: str) -> None:
    text = run_file(stages=[1], steps=4, precision="fp32", learning_rate=0.05)
    text = adapter_run(text, publish(tmp_path / "published", family), weights=weights) if family else text
    prompts = ["def f", "class "]
    with nodes_of(text, 1, 1) as nodes:
        (generation,) = nodes.generations.values()
        told = list[list[str]]()
        for _ in range(2):
            nodes.train()
            taken = weights_of(generation.stage, nodes.step)
            expected = [judged(generation.stage, prompt) for prompt in prompts]
            nodes.train()  # the weights change meanwhile
            texts = written(generation.loaded, taken, prompts, CPU, threading.Event())
            assert texts.step == nodes.step - 1
            told.append([each.text for each in texts.texts])
            assert told[-1] == expected
    assert told[0] != told[1]


def loaded_run() -> tuple[LoadedRun, Stage]:
    with nodes_of(run_file(stages=[1], steps=4), 1, 1) as nodes:
        (generation,) = nodes.generations.values()
        return generation.loaded, generation.stage


def test_a_request_that_comes_while_the_node_still_writes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, stage = loaded_run()
    told, may_go_on = list[NodeMessage](), threading.Event()
    inner = writing.written

    def slowly(*arguments: object) -> object:
        assert may_go_on.wait(60)
        return inner(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "written", slowly)
    node = Writing(CPU, told.append)
    node.begin(loaded, 1, ["def f"], stage.weights, lambda *_: None)
    node.begin(loaded, 2, ["def f"], stage.weights, lambda *_: None)
    may_go_on.set()
    assert node._thread is not None
    node._thread.join(60)
    assert [message.texts.step for message in told] == [1]
    assert not told[0].texts.problem
    node.begin(loaded, 3, ["def f"], {}, lambda *_: (4, {index: flat.clone() for index, flat in stage.weights.items()}))
    node._thread.join(60)
    assert told[1].texts.step == 4, "an idle node's copies are a step further by now"


def test_without_room_for_a_copy_of_the_weights_there_are_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, stage = loaded_run()
    monkeypatch.setattr(writing, "free_memory", lambda _: 2 * sum(w.nbytes for w in stage.weights.values()) - 2)
    told = list[NodeMessage]()
    Writing(CPU, told.append).begin(loaded, 1, ["def f"], stage.weights, lambda *_: None)
    assert "a copy of the weights takes" in told[0].texts.problem


def test_weights_that_cannot_be_copied_after_all_harm_nobody() -> None:
    class Full:
        def clone(self) -> None:
            raise torch.OutOfMemoryError("no room")

    loaded, _ = loaded_run()
    told = list[NodeMessage]()
    Writing(CPU, told.append).begin(loaded, 1, ["def f"], {0: Full()}, lambda *_: None)  # type: ignore[dict-item]
    assert "no room" in told[0].texts.problem


def test_a_writing_that_is_called_off_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, stage = loaded_run()
    over = threading.Event()
    over.set()
    with pytest.raises(ValueError, match="the plan has changed"):
        written(loaded, weights_of(stage, 1), ["def f"], CPU, over)
    with pytest.raises(ValueError, match="changes too often"):
        wait_for(lambda: None, 1, over)


def test_a_text_gets_its_share_of_the_time_while_the_node_works_and_all_of_it_while_the_node_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            return self.is_set()

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    over = Over()
    pace = Pace(over)
    pace.begins()
    now[0] += 1.0
    with WORK.working():
        assert pace.goes_on()
        assert now[0] - 100.0 == pytest.approx(1 / writing.SHARE, rel=0.01)
        now[0] += 1.0
        before = now[0]
        with WORK.waiting():
            assert pace.goes_on()
        assert now[0] == before
        over.set()
        assert not pace.goes_on()
    assert MOST_TOKENS <= 256
