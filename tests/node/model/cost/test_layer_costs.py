"""The cost of a model as reported to the scheduler."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch

from dtfm.node.data.samples import Sample
from dtfm.node.model.cost import layer_costs as layer_costs_module
from dtfm.node.model.cost.layer_costs import layer_costs, layer_flops
from dtfm.node.model.load import load_model
from dtfm.protos import plan_pb2
from dtfm.protos.control_pb2 import Device
from tests.node.model.test_stage import LENGTH, SIZES, VOCABULARY, model_of

CPU = torch.device("cpu")
HARDWARE = Device(kind="cpu", memory_bytes=1 << 30, flops=1e12)
TRAIN = plan_pb2.Run.Train(micro_batch=3, global_batch=12)


def test_a_llama_costs_what_its_matrix_products_cost() -> None:
    hidden, inner, tokens = 32, 48, 3 * LENGTH
    costs = layer_costs(model_of("llama"), plan_pb2.Run(train=TRAIN))
    assert [layer.name for layer in costs] == ["embedding", "layer 1", "layer 2", "layer 3", "head"]
    projections = hidden * hidden * 3  # query, key and value (half as many heads), output
    attention = 2 * LENGTH * hidden  # scores and their weighted sum, per token
    decoder = 2 * tokens * (projections + attention + 3 * hidden * inner)
    assert [layer.forward_flops for layer in costs[1:]] == [decoder] * 3 + [2 * tokens * hidden * VOCABULARY]
    assert costs[0].forward_flops < decoder / 100
    weights = projections + 3 * hidden * inner + 2 * hidden
    assert [layer.parameter_bytes for layer in costs] == [
        4 * VOCABULARY * hidden,
        *[4 * weights] * 3,
        4 * (VOCABULARY + 1) * hidden,
    ]
    assert [layer.activation_bytes for layer in costs] == [4 * tokens * hidden] * 4 + [4 * tokens * VOCABULARY]


def test_a_tied_parameter_counts_for_every_layer_that_uses_it() -> None:
    costs = layer_costs(model_of("gpt2"), plan_pb2.Run(train=TRAIN))
    tied, positions, norm = VOCABULARY * 32, 1024 * 32, 2 * 32
    assert costs[0].parameter_bytes == 4 * (tied + positions)
    assert costs[-1].parameter_bytes == 4 * (tied + norm)


def test_precision_changes_the_bytes_but_not_the_flops() -> None:
    single, mixed, double = (
        layer_costs(
            model_of("llama"), plan_pb2.Run(train=plan_pb2.Run.Train(micro_batch=3, global_batch=12, precision=p))
        )
        for p in (plan_pb2.FP32, plan_pb2.BF16, plan_pb2.FP64)
    )
    for one, half in zip(single, mixed, strict=True):
        assert (half.forward_flops, half.parameter_bytes) == (one.forward_flops, one.parameter_bytes)
        assert half.activation_bytes == one.activation_bytes / 2
    for one, two in zip(single, double, strict=True):
        assert two.forward_flops == one.forward_flops
        assert (two.parameter_bytes, two.activation_bytes) == (2 * one.parameter_bytes, 2 * one.activation_bytes)


def test_a_convnets_layers_are_unequal() -> None:
    costs = layer_costs(model_of("convnet"), plan_pb2.Run(train=TRAIN))
    by_name = {layer.name: layer for layer in costs}
    assert by_name["0"].forward_flops == 3 * 2 * 144 * 8 * 3 * 9
    assert by_name["3"].forward_flops == 3 * 2 * 36 * 12 * 8 * 9
    assert by_name["6"].forward_flops == 3 * 2 * 432 * 4
    assert (by_name["2"].forward_flops, by_name["2"].parameter_bytes) == (0, 0)
    assert by_name["3"].activation_bytes == 4 * 3 * 12 * 36


@pytest.mark.parametrize("name", ["llama", "gpt2", "convnet"])
def test_the_same_model_costs_the_same_again(name: str) -> None:
    run = plan_pb2.Run(train=TRAIN)
    assert layer_costs(model_of(name), run) == layer_costs(model_of.__wrapped__(name), run)


@pytest.mark.soak
def test_the_cost_of_a_model_too_large_for_any_machine_is_known_at_once() -> None:
    config = SIZES | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 12,
    }
    config |= {"max_position_embeddings": 4096}
    spec = plan_pb2.Run.Model(family="llama", config_json=json.dumps(config))
    model = load_model(spec, Sample((4096,), torch.int64, 128256))
    assert sum(bucket.size for bucket in model.buckets) > 10e9
    assert layer_costs(model, plan_pb2.Run(train=TRAIN))[1].forward_flops > 4e12


@pytest.mark.parametrize(("name", "layer"), [("llama", 1), ("gpt2-untied", 1), ("convnet", 0)])
@pytest.mark.parametrize(
    "precision",
    [plan_pb2.BF16, *(pytest.param(other, marks=pytest.mark.soak) for other in (plan_pb2.FP32, plan_pb2.FP64))],
)
def test_the_speed_of_a_device_is_that_of_the_layers_with_most_flops(
    name: str, layer: int, precision: plan_pb2.Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[int, float]] = []
    really = layer_costs_module._pass_seconds

    def pass_seconds(*arguments: Any) -> float:
        timed.append((arguments[1], really(*arguments)))
        return timed[-1][1]

    monkeypatch.setattr(layer_costs_module, "_pass_seconds", pass_seconds)
    monkeypatch.setattr(layer_costs_module, "TIMED_SECONDS", 0.0)
    model = model_of(name)
    train = plan_pb2.Run.Train(micro_batch=3, global_batch=12, precision=precision)
    speed = layer_flops(model, plan_pb2.Run(train=train), CPU, HARDWARE)
    ((number, seconds),) = timed
    assert number == layer
    assert speed is not None
    assert speed * seconds == pytest.approx(3 * 3 * model.layers[number].flops)
    assert 1e5 < speed < HARDWARE.flops


@pytest.mark.parametrize("name", ["llama", "convnet"])
def test_a_first_layer_is_timed_on_inputs_of_its_kind(name: str) -> None:
    assert 0 < layer_costs_module._pass_seconds(model_of(name), 0, plan_pb2.Run(train=TRAIN), CPU) < 60


def test_timing_does_not_change_the_random_state() -> None:
    before = torch.get_rng_state()
    layer_flops(model_of("llama"), plan_pb2.Run(train=TRAIN), CPU, HARDWARE)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("device", [Device(memory_bytes=1 << 30, flops=1e3), Device(memory_bytes=1 << 10, flops=1e12)])
def test_a_layer_that_takes_too_long_or_does_not_fit_is_not_timed(device: Device) -> None:
    assert layer_flops(model_of("llama"), plan_pb2.Run(train=TRAIN), CPU, device) is None


def test_a_slow_first_pass_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_costs_module, "MOST_EXPECTED_SECONDS", 0.0)
    monkeypatch.setattr(layer_costs_module, "TIMED_SECONDS", 1e6)
    assert layer_costs_module._pass_seconds(model_of("llama"), 1, plan_pb2.Run(train=TRAIN), CPU) > 0


def test_the_layer_that_was_timed_takes_no_memory_afterwards() -> None:
    layer_flops(model_of("llama"), plan_pb2.Run(train=TRAIN), CPU, HARDWARE)
    before = sum(type(thing) is torch.nn.Parameter for thing in gc.get_objects())
    layer_flops(model_of("llama"), plan_pb2.Run(train=TRAIN), CPU, HARDWARE)
    assert sum(type(thing) is torch.nn.Parameter for thing in gc.get_objects()) == before


def test_a_layer_that_fails_on_made_up_input_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise IndexError("of the model's own code")

    monkeypatch.setattr(layer_costs_module, "_pass_seconds", fails)
    assert layer_flops(model_of("llama"), plan_pb2.Run(train=TRAIN), CPU, HARDWARE) is None
