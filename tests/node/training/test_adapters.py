"""Nodes that train an adapter, without sockets: they train what one process with transformers, bitsandbytes and peft trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtfm.node.model import loss
from dtfm.node.model.cost.layer_memory import layer_memory
from tests.cluster.plain import plain_adapter
from tests.cluster.runs import losses_alone, run_at, run_file
from tests.node.in_process import InProcess, nodes_of
from tests.published import adapter_run, publish

STEPS = 4


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained_by(nodes: InProcess) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for generation in nodes.generations.values():
        for bucket in generation.stage.buckets.values():
            found |= bucket.views(bucket.parameters)
    return found


@pytest.mark.parametrize(
    ("family", "precision", "weights", "stages", "tolerance"),
    [
        pytest.param("llama", "fp32", "bf16", 1, 1e-6, marks=pytest.mark.soak),
        pytest.param("qwen3", "fp32", "bf16", 3, 1e-6, marks=pytest.mark.soak),
        ("gemma2", "fp32", "bf16", 3, 1e-6),
        pytest.param("gpt2", "fp64", "bf16", 3, 1e-9, marks=pytest.mark.soak),
        ("llama", "fp32", "nf4", 2, 1e-4),
        pytest.param("llama", "fp32", "int8", 3, 1e-4, marks=pytest.mark.soak),
    ],
)
def test_losses_and_adapters_equal_one_process(
    tmp_path: Path, family: str, precision: str, weights: str, stages: int, tolerance: float
) -> None:
    text = run_file(stages=[1] * stages, steps=STEPS, precision=precision)
    with nodes_of(adapter_run(text, publish(tmp_path / family, family), weights=weights), stages, 1) as nodes:
        losses = [nodes.train() for _ in range(STEPS)]
        adapter = trained_by(nodes)
    path = tmp_path / "run.toml"
    assert losses == pytest.approx(losses_alone(path), rel=0, abs=tolerance)
    alone = plain_adapter(run_at(path), STEPS)
    assert adapter.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(adapter[name], value, rtol=0, atol=10 * tolerance, msg=name)


@pytest.mark.parametrize(
    ("family", "weights", "stages", "names", "tolerance"),
    [
        ("llama", "bf16", 2, '["embed_tokens", "lm_head", "norm"]', 1e-6),
        pytest.param("llama", "bf16", 1, '["embed_tokens", "lm_head", "norm"]', 1e-6, marks=pytest.mark.soak),
        ("gemma2", "bf16", 2, '["embed_tokens"]', 1e-6),
        pytest.param("gpt2", "bf16", 3, '["lm_head", "ln_f"]', 1e-6, marks=pytest.mark.soak),
        pytest.param("llama", "nf4", 2, '["lm_head", "down_proj"]', 1e-4, marks=pytest.mark.soak),
    ],
)
def test_so_do_modules_that_are_trained_whole(
    tmp_path: Path, family: str, weights: str, stages: int, names: str, tolerance: float
) -> None:
    """The heads of gemma2 and gpt2 are their embeddings."""
    text = run_file(stages=[1] * stages, steps=STEPS, precision="fp32")
    run = adapter_run(
        text, publish(tmp_path / family, family), weights=weights, adapter=f"rank = 4\ntrain_also = {names}"
    )
    with nodes_of(run, stages, 1) as nodes:
        losses = [nodes.train() for _ in range(STEPS)]
        trained = trained_by(nodes)
    path = tmp_path / "run.toml"
    assert losses == pytest.approx(losses_alone(path), rel=0, abs=tolerance)
    alone = plain_adapter(run_at(path), STEPS)
    assert trained.keys() == alone.keys()
    assert not all(".lora_" in name for name in trained)
    for name, value in alone.items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=10 * tolerance, msg=name)


@pytest.mark.soak
def test_the_head_may_make_its_logits_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LEAST_TOKENS", 8)
    monkeypatch.setattr(loss, "MOST_LOGITS_BYTES", 1)
    text = run_file(stages=[1, 1], steps=2, precision="fp32")
    with nodes_of(adapter_run(text, publish(tmp_path / "published")), 2, 1) as nodes:
        memory = layer_memory(nodes.generations["n1"].stage.model, 2, torch.float32, torch.float32)
        losses = [nodes.train() for _ in range(2)]
    assert losses == pytest.approx(losses_alone(tmp_path / "run.toml"), rel=0, abs=1e-6)
    assert memory[-1].working, "it is measured, not guessed"


@pytest.mark.soak
def test_a_stage_may_have_nothing_to_train(tmp_path: Path) -> None:
    """The first stage is the embedding alone, the last one the head."""
    text = run_file(stages=[1] * 5, steps=2, precision="fp32")
    with nodes_of(adapter_run(text, publish(tmp_path / "published")), 5, 1) as nodes:
        losses = [nodes.train() for _ in range(2)]
        assert nodes.evaluate() > 0
    assert losses == pytest.approx(losses_alone(tmp_path / "run.toml"), rel=0, abs=1e-6)
