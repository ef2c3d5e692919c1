"""Layers that torch.compile has made: `node/model/compiled_layer.py`."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from dtfm.coordinator.core.trust.tolerance import PRECISIONS
from dtfm.node.data.samples import Sample
from dtfm.node.model import compiled_layer
from dtfm.node.model.causal.slice import ISOLATING
from dtfm.node.model.compiled_layer import can_compile
from dtfm.node.model.cost import layer_costs
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.node.model.stage import Stage, build_stage
from dtfm.protos import plan_pb2
from dtfm.protos.control_pb2 import Device
from dtfm.scheduler.model.memory import Checkpointing, Keeping
from tests.node.allocated import left_allocated
from tests.node.model.initialised import initialise_all
from tests.node.model.test_documents import isolated
from tests.node.model.test_stage import LENGTH, batch_of, model_of, train
from tests.published import publish

CPU = torch.device("cpu")
SAMPLE = Sample((LENGTH,), torch.int64, 256)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    compiled_layer._compiled.cache_clear()
    before = torch._dynamo.config.suppress_errors, torch._inductor.config.emulate_precision_casts
    yield
    torch._dynamo.config.suppress_errors, torch._inductor.config.emulate_precision_casts = before


def with_compiled_layers(model: Model) -> Model:
    model.compiles = True
    return model


def middle_of(model: Model, dtype: torch.dtype = torch.float32, keeping: Keeping = Keeping()) -> Stage:  # noqa: B008
    """All layers but the embedding and the head."""
    stage = build_stage(model, 1, len(model.layers) - 1, CPU, torch.float32, computes_in=dtype, keeping=keeping)
    initialise_all(stage, 5)
    return stage


def both_ways(stage: Stage) -> list[torch.Tensor]:
    """What comes out, its gradient for what went in, and those of the parameters."""
    x = torch.randn(3, LENGTH, 32, generator=torch.Generator().manual_seed(1)).to(stage.dtype).requires_grad_()
    y = stage.forward(x)
    y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return [y.detach(), x.grad, *(bucket.gradients.clone() for bucket in stage.buckets.values())]


@pytest.mark.soak  # PyTorch's headers alone take half a minute to compile
@pytest.mark.parametrize("checkpointing", Checkpointing)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_layers_compute_what_an_audit_accepts_and_keep_no_more(
    precision: str, checkpointing: Checkpointing
) -> None:
    assert can_compile(CPU)
    counters.clear()
    dtype, keeping = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision], Keeping(checkpointing)
    plain = middle_of(model_of("llama"), dtype, keeping)
    made = middle_of(with_compiled_layers(model_of.__wrapped__("llama")), dtype, keeping)
    for ours, theirs in zip(both_ways(made), both_ways(plain), strict=True):
        apart = (ours - theirs).float().norm() / theirs.float().norm()
        assert 0 <= apart < PRECISIONS[precision] / 10
    assert counters["stats"]["unique_graphs"] == 1

    def kept(stage: Stage) -> int:
        x = torch.randn(3, LENGTH, 32).to(dtype).requires_grad_()
        return left_allocated(lambda: outputs.append(stage.forward(x)))

    outputs: list[torch.Tensor] = []
    assert kept(made) <= kept(plain)


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted(ISOLATING))
def test_the_layers_of_a_family_are_compiled_once_for_all_of_a_kind(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, made = (middle_of(model) for model in (isolated(family), with_compiled_layers(isolated(family))))
    for ours, theirs in zip(both_ways(made), both_ways(plain), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        made.forward(torch.randn(3, LENGTH, 32))
    assert not counters["graph_break"]
    assert 2 <= counters["stats"]["unique_graphs"] <= 4, "for training and evaluations, of at most two kinds of layers"


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_train_lengths_of_rows_as_peft_does(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DoRA. peft asks for the type of the matrix in ways that PyTorch does not compile, so there are several pieces."""
    if backend == "inductor":
        assert can_compile(CPU)
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    adapter = plan_pb2.Run.Adapter(rank=4, alpha=8, dora=True, targets=["q_proj", "down_proj"])
    folder = publish(tmp_path, num_hidden_layers=1)
    spec = plan_pb2.Run.Model(pretrained=str(folder), weights="bf16", adapter=adapter)
    plain, made = (
        middle_of(model) for model in (load_model(spec, SAMPLE), with_compiled_layers(load_model(spec, SAMPLE)))
    )
    for ours, theirs in zip(both_ways(made), both_ways(plain), strict=True):
        assert 0 <= (ours - theirs).norm() / theirs.norm() < PRECISIONS["fp32"] / 10
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.soak), "convnet"])
def test_a_stage_of_compiled_layers_is_freed_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, but for that which compiled: that one has timed the device."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = with_compiled_layers(model_of.__wrapped__(name))
    for _ in range(2):
        stage = build_stage(model, 0, len(model.layers), CPU, torch.float32)
        initialise_all(stage, 5)
        train([stage], *batch_of(name))
    assert counters["stats"]["unique_graphs"] > 0
    alive = [weakref.ref(each) for mine in stage.parameters.values() for each in mine]
    gc.collect()
    gc.disable()
    try:
        del stage
        assert [parameter() for parameter in alive if parameter() is not None] == []
    finally:
        gc.enable()


@pytest.mark.soak
def test_a_device_is_timed_once_its_layers_are_compiled_for_training_and_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model, run = with_compiled_layers(model_of.__wrapped__("llama")), plan_pb2.Run(train={"micro_batch": 3})
    assert layer_costs._pass_seconds(model, 1, run, CPU) < layer_costs.MOST_EXPECTED_SECONDS
    compiled_by_then = counters["stats"]["unique_graphs"]
    stage = middle_of(model)
    both_ways(stage)
    with torch.no_grad():
        stage.forward(torch.randn(3, LENGTH, 32))
    assert counters["stats"]["unique_graphs"] == compiled_by_then == 2


def test_a_model_whose_compiled_layers_fail_is_trained_with_layers_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_what_fails(_function: object, **_options: object) -> Callable[..., Any]:
        def fails(*_arguments: object, **_keywords: object) -> None:
            raise RuntimeError("out of shared memory")

        return fails

    monkeypatch.setattr(torch, "compile", compile_what_fails)
    model, run = with_compiled_layers(model_of.__wrapped__("llama")), plan_pb2.Run(train={"micro_batch": 3})
    speed = layer_costs.layer_flops(model, run, CPU, Device(kind="cpu", memory_bytes=1 << 30, flops=1e12))
    assert speed is not None
    assert not model.compiles
    assert "because compiled layer 1 fails: out of shared memory" in caplog.text


@pytest.mark.soak
def test_where_nothing_can_be_compiled_the_log_says_what_is_missing(tmp_path: Path) -> None:
    call = "from dtfm.node.model.compiled_layer import can_compile; print(can_compile(torch.device('cpu')))"
    none = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", f"import torch; {call}"]
    tried = subprocess.run(command, env=os.environ | none, capture_output=True, text=True, check=True)
    assert tried.stdout == "False\n"
    assert (
        "train.compile: the layers are not compiled here, which is slower: PyTorch cannot compile for cpu ("
        in tried.stderr
    )
    assert "(apt-get install g++)" in tried.stderr
