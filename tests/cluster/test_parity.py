"""Nodes together train exactly what one process would."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.cluster.launch import Cluster
from tests.cluster.runs import GPT2, losses_alone, run_file
from tests.tokenizer import make_tokenizer

STEPS = 12
CONVNET = """
[model]
family = "module"
module = "tests.convnet:convnet"
"""


def train(folder: Path, text: str, nodes: int, *options: str, invited: bool = False) -> Cluster:
    with Cluster(folder, text, invited=invited) as cluster:
        for number in range(nodes):
            cluster.add(f"n{number}", *options)
        assert cluster.finish() == 0
    return cluster


def assert_equal_losses(cluster: Cluster, tolerance: float, allowed: tuple[str, ...] = ()) -> None:
    expected = losses_alone(cluster.run_file, allowed)
    assert cluster.losses == pytest.approx(expected, rel=tolerance, abs=0)
    # Replicas vote with a digest of their state; the coordinator compares the digests and ends the run when they differ.
    assert not cluster.of("digest_mismatch")
    assert [e["step"] for e in cluster.of("step_committed")] == list(range(1, STEPS + 1))
    assert all(e["samples"] == 20 for e in cluster.of("step_committed"))


SHAPES = {"2x2": [2, 2], "4x1": [1, 1, 1, 1], "1x4": [4], "2+1+1": [2, 1, 1]}
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2}


def cases() -> Iterator[ParameterSet]:
    """fp64, whose tolerance is tight, with unequal stages. The rest is for `make soak`; of bf16 the one process computes the
    losses in fp32."""
    for precision, (name, stages) in itertools.product(TOLERANCES, SHAPES.items()):
        short = (precision, name) == ("fp64", "2+1+1")
        marks = [] if short else [pytest.mark.soak]
        yield pytest.param(stages, precision, id=f"{precision}-{name}", marks=marks)


@pytest.mark.parametrize(("stages", "precision"), list(cases()))
def test_llama(tmp_path: Path, stages: list[int], precision: str) -> None:
    text = run_file(stages=stages, steps=STEPS, precision=precision)
    cluster = train(tmp_path, text, sum(stages))
    assert_equal_losses(cluster, TOLERANCES[precision])
    plan = cluster.of("plan_adopted")[-1]["plan"]
    assert [len(stage["replicas"]) for stage in plan["stages"]] == stages


def test_gpt2_with_its_tied_embedding_on_different_nodes_that_do_not_trust_each_other(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[2, 1, 1], steps=STEPS) + '[trust]\nmode = "open"\n'
    cluster = train(tmp_path, text, 4, invited=True)
    assert_equal_losses(cluster, 1e-9)
    assert not cluster.of("gradients_clipped")


TALK = "{% for m in messages %}<{{m.role}}>{{m.content}}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_answers_alone_are_learnt_and_each_sample_counts_alike(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", "what is it? it is this, or that")
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TALK}))
    talks = [
        [
            {"role": "user", "content": "what is it?" * (n % 7)},
            {"role": "assistant", "content": "it is this " * (n % 5)},
        ]
        for n in range(100)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    text = run_file(model=GPT2, stages=[1, 2], steps=STEPS, source=str(tmp_path / "talks.jsonl"))
    text = text.replace("[data]\n", f'[data]\ntokenizer = "{tokenizer}"\ntext_field = "messages"\n')
    assert_equal_losses(train(tmp_path, text, 3), 1e-9)


def test_a_convolutional_network(tmp_path: Path) -> None:
    text = run_file(model=CONVNET, stages=[1, 2], steps=STEPS, source="module:tests.convnet:images")
    cluster = train(tmp_path, text, 3, "--allow-module", "tests.convnet")
    assert_equal_losses(cluster, 1e-9, ("tests.convnet",))
