"""What is planned for a layer's memory is what it takes."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from dtfm.node.data.samples import Sample
from dtfm.node.model.cost import layer_memory as layer_memory_module
from dtfm.node.model.cost.layer_memory import USUALLY_KEPT, layer_memory
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.node.model.stage import build_stage
from dtfm.protos import plan_pb2
from dtfm.protos.plan_pb2 import BF16, FP32, Run
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from tests.node.model.initialised import initialise_all
from tests.node.model.test_stage import CPU, NAMES, batch_of, model_of
from tests.node.stage_memory import measured_bytes, planned_bytes

STAGES = {"first": (0, 3), "middle": (2, 4), "last": (4, 6)}
IN_FLIGHT = {"first": 4, "middle": 3, "last": 1}


@cache
def llama() -> Model:
    """Wide enough that what does not grow with the width is little."""
    config = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
    spec = plan_pb2.Run.Model(family="llama", config_json=json.dumps(config | {"num_hidden_layers": 4}))
    return load_model(spec, Sample((256,), torch.int64, 1000))


def run_of(micro_batch: int, precision: plan_pb2.Precision) -> Run:
    train = Run.Train(micro_batch=micro_batch, global_batch=8 * micro_batch, precision=precision, steps=2)
    train.beta1, train.beta2, train.epsilon = 0.9, 0.95, 1e-8
    return Run(train=train)


@pytest.mark.parametrize(
    "optimizer_state", [OptimizerState.DEVICE, pytest.param(OptimizerState.HOST, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("checkpointing", Checkpointing)
@pytest.mark.parametrize(
    "place", ["middle", *(pytest.param(place, marks=pytest.mark.soak) for place in ("first", "last"))]
)
def test_a_stage_takes_the_memory_that_is_planned(
    place: str, checkpointing: Checkpointing, optimizer_state: OptimizerState
) -> None:
    """More of these, at the width of real models, are in tests/bench/stage_memory.py."""
    model, run = llama(), run_of(2, FP32 if checkpointing is Checkpointing.LAYER else BF16)
    keeping, layers, in_flight = Keeping(checkpointing, optimizer_state), STAGES[place], IN_FLIGHT[place]
    planned = planned_bytes(model, run, layers, keeping, in_flight)
    measured = measured_bytes(model, run, list(STAGES).index(place), layers, keeping, in_flight)
    assert measured == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("name", [*NAMES[:3], *(pytest.param(name, marks=pytest.mark.soak) for name in NAMES[3:])])
def test_a_layer_keeps_what_autograd_saves(name: str) -> None:
    model = model_of(name)
    inputs, _ = batch_of(name)
    memory = layer_memory(model, len(inputs), torch.float32, torch.float32)
    x = inputs
    for number in range(len(model.layers) - 1):
        stage = build_stage(model, number, number + 1, CPU, torch.float32)
        initialise_all(stage, 5)
        x = x.detach().requires_grad_() if number else x
        saved = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}
        weights = {flat.untyped_storage().data_ptr() for flat in stage.weights.values()}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved, but: set[int] = weights) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in but:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            x = stage.forward(x)
        assert memory[number].kept == pytest.approx(sum(saved.values()), rel=0.05, abs=2048)


def test_attention_keeps_no_scores() -> None:
    """Twice the tokens keep twice as much."""
    config = json.dumps(
        {"hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 352, "num_attention_heads": 4}
    )
    kept = []
    for tokens in (1024, 2048):
        spec = plan_pb2.Run.Model(family="llama", config_json=config)
        model = load_model(spec, Sample((tokens,), torch.int64, 1000))
        kept.append(layer_memory(model, 1, torch.bfloat16, torch.float32)[1].kept)
    assert kept[1] == pytest.approx(2 * kept[0], rel=0.01)


def test_it_is_the_same_again_and_in_proportion_to_the_micro_batch() -> None:
    one, again, four = (layer_memory(llama(), size, torch.bfloat16, torch.float32) for size in (1, 1, 4))
    assert one == again
    assert four[2].kept == pytest.approx(4 * one[2].kept, rel=0.05)


def test_a_model_that_cannot_be_followed_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(layer_memory_module, "_of_layer", fail)
    kept = [memory.kept for memory in layer_memory(llama(), 3, torch.float32, torch.float32)]  # not known yet
    assert kept[1] == USUALLY_KEPT * 4 * 3 * 256 * 128
