"""Nodes that train an adapter, without sockets: they train what one process with transformers, bitsandbytes and peft trains."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtfm.node.data.load import load_data
from dtfm.node.model import loss
from dtfm.node.model.cost.layer_memory import layer_memory
from dtfm.scheduler.model.memory import Checkpointing, Keeping
from tests.cluster.plain import adamw_of, adapted_model, mean_loss, plain_adapter, trained_in, update, whole_batch
from tests.cluster.runs import held_out_losses_alone, losses_alone, run_at, run_file
from tests.node.in_process import InProcess, nodes_of
from tests.node.training.audits.auditors import Auditors, errors
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
        pytest.param("gemma2", "bf16", 2, '["embed_tokens"]', 1e-6, marks=pytest.mark.soak),
        pytest.param("gpt2", "bf16", 3, '["lm_head", "ln_f"]', 1e-6, marks=pytest.mark.soak),
        pytest.param("llama", "nf4", 2, '["lm_head", "norm"]', 1e-4, marks=pytest.mark.soak),
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


@pytest.mark.parametrize(
    ("family", "weights", "stages", "adapter", "tolerance"),
    [
        ("llama", "bf16", 2, "dora = true", 1e-6),
        pytest.param("qwen2", "bf16", 1, "dora = true", 1e-6, marks=pytest.mark.soak),
        pytest.param("gemma2", "bf16", 1, "dora = true", 1e-6, marks=pytest.mark.soak),
        pytest.param("gpt2", "bf16", 2, 'dora = true\ntrain_also = ["ln_f"]', 1e-6, marks=pytest.mark.soak),
        pytest.param("llama", "bf16", 2, "dora = true\ndropout = 0.1", 1e-6, marks=pytest.mark.soak),
        pytest.param("llama", "nf4", 2, "dora = true", 1e-4, marks=pytest.mark.soak),
    ],
)
def test_so_do_lengths_of_rows_beside_their_directions(
    tmp_path: Path, family: str, weights: str, stages: int, adapter: str, tolerance: float
) -> None:
    """DoRA: peft sets the lengths that the judge begins with. Evaluations drop nothing."""
    text = run_file(stages=[1] * stages, steps=STEPS, precision="fp32", learning_rate=3e-3)
    published = publish(tmp_path / family, family)
    with nodes_of(adapter_run(text, published, weights=weights, adapter=f"rank = 4\n{adapter}"), stages, 1) as nodes:
        losses = [nodes.train() for _ in range(STEPS)]
        held_out, trained = nodes.evaluate(), trained_by(nodes)
    path = tmp_path / "run.toml"
    assert losses == pytest.approx(losses_alone(path), rel=0, abs=tolerance)
    assert held_out == pytest.approx(held_out_losses_alone(path, STEPS)[-1], rel=0, abs=tolerance)
    alone = plain_adapter(run_at(path), STEPS)
    assert trained.keys() == alone.keys()
    assert sum("lora_magnitude_vector" in name for name in trained) == sum("lora_A" in name for name in trained) > 0
    for name, value in alone.items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=10 * tolerance, msg=name)


@pytest.mark.soak
def test_lengths_of_rows_in_bf16_are_those_of_pefts_own_loop(tmp_path: Path) -> None:
    """The loop keeps its numbers in fp32, and has peft compute with copies in bf16, a micro-batch at a time."""
    text = run_file(stages=[1, 1], steps=2, precision="bf16", learning_rate=3e-3)
    published = publish(tmp_path / "llama")
    with nodes_of(adapter_run(text, published, adapter="rank = 4\ndora = true"), 2, 1) as nodes:
        losses = [nodes.train() for _ in range(2)]
        trained = trained_by(nodes)
    run = run_at(tmp_path / "run.toml")
    data, of_step = load_data(run), run.train.global_batch // run.train.micro_batch
    kept = adapted_model(run, data)
    computing, optimizer, alone = copy.deepcopy(kept), adamw_of(run, kept), list[float]()
    for step in (1, 2):
        alone.append(0.0)
        for mine, own in zip(computing.parameters(), kept.parameters(), strict=True):
            mine.data = own.detach().bfloat16()
        for number in range((step - 1) * of_step, step * of_step):
            inputs, labels = whole_batch(run, data, [number])
            part = mean_loss(computing(inputs).logits.float(), labels, per_token=False) / of_step
            torch.autograd.backward(part)
            alone[-1] += part.item()
            for mine, own in zip(computing.parameters(), kept.parameters(), strict=True):
                if mine.grad is not None:
                    own.grad = mine.grad.float() + (0 if own.grad is None else own.grad)
                    mine.grad = None
        update(run, kept, optimizer, step)
    assert losses == pytest.approx(alone, rel=0, abs=1e-6)
    assert losses != pytest.approx(losses_alone(tmp_path / "run.toml"), rel=0, abs=1e-4), "it is bf16"
    for name, value in trained_in(kept).items():
        torch.testing.assert_close(trained[name], value.detach(), rtol=0, atol=1e-6, msg=name)


DROPOUT = "rank = 4\ndropout = 0.1"


@pytest.mark.parametrize(
    ("stages", "replicas", "checkpointing"),
    [
        pytest.param(1, 1, Checkpointing.NONE, marks=pytest.mark.soak),
        (2, 1, Checkpointing.LAYER),
        pytest.param(2, 2, Checkpointing.NONE, marks=pytest.mark.soak),
    ],
)
def test_adapters_drop_the_same_numbers_on_any_nodes(
    tmp_path: Path, stages: int, replicas: int, checkpointing: Checkpointing
) -> None:
    """Also in a step that goes on after an interruption, and where layers are computed again. Evaluations drop nothing."""
    published = publish(tmp_path / "llama")
    text = run_file(stages=[replicas] * stages, steps=STEPS, precision="fp32")
    keeping = Keeping(checkpointing=checkpointing)
    with nodes_of(adapter_run(text, published, adapter=DROPOUT), stages, replicas, keeping) as nodes:
        losses = [nodes.train()]
        nodes.interrupt(8)
        nodes.go_on(replace(nodes.plan, generation=2))
        losses += [nodes.train() for _ in range(STEPS - 1)]
        held_out, adapter = nodes.evaluate(), trained_by(nodes)
    path = tmp_path / "run.toml"
    assert losses == pytest.approx(losses_alone(path), rel=0, abs=1e-6)
    assert held_out == pytest.approx(held_out_losses_alone(path, STEPS)[-1], rel=0, abs=1e-6)
    for name, value in plain_adapter(run_at(path), STEPS).items():
        torch.testing.assert_close(adapter[name], value, rtol=0, atol=1e-5, msg=name)
    path.write_text(adapter_run(text, published))
    assert losses != pytest.approx(losses_alone(path), rel=0, abs=1e-4)


@pytest.mark.parametrize("adapter", [DROPOUT, pytest.param(f"{DROPOUT}\ndora = true", marks=pytest.mark.soak)])
def test_who_does_a_step_again_drops_what_was_dropped(tmp_path: Path, adapter: str) -> None:
    text = f"{run_file(stages=[2, 2], steps=1, precision='fp32')}[trust]\naudit_rate = 1\n"
    with nodes_of(adapter_run(text, publish(tmp_path / "llama"), adapter=adapter)) as nodes:
        step = Auditors(nodes)
        for accused, auditor, bucket in (("n0", "n1", 1), ("n2", "n3", 3)):
            found = errors(step.answer(auditor, step.asked(accused, bucket=bucket)))
            assert max(found) == 0, found


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
