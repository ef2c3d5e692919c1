"""Stages, cut anywhere, compute what the whole model computes."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from dtfm.node.data.samples import Sample
from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.node.model.sequential import load_sequential
from dtfm.node.model.stage import Stage, build_stage
from dtfm.protos import plan_pb2
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from tests.convnet import SIDE, images
from tests.node.allocated import left_allocated
from tests.node.model.initialised import initialise_all

CPU = torch.device("cpu")
LENGTH, VOCABULARY = 12, 61
CONVNET = plan_pb2.Run.Model(family="module", module="tests.convnet:convnet")
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2},
    "llama-tied": SIZES | {"intermediate_size": 48, "tie_word_embeddings": True},
    "gpt2": SIZES,
    "gpt2-untied": SIZES | {"tie_word_embeddings": False},
    "gpt_neox": SIZES | {"intermediate_size": 48},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "mistral": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 4},
    "qwen2": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2},
    "gemma2": SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "opt": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}
NAMES = ["convnet", *CONFIGS]
EXPERTS = SIZES | {"num_key_value_heads": 2, "num_experts_per_tok": 2}
#: PyTorch multiplies by experts in 32 bits or fewer.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS | {"intermediate_size": 48, "num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 16, "num_experts": 4},
}
#: Its table of positions is a buffer, and its own code wants 32 bits or fewer.
POSITIONS_IN_BUFFER: dict[str, dict[str, Any]] = {
    "xglm": {
        "d_model": 32,
        "num_layers": 3,
        "attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": LENGTH + 1,
    },
}


@cache
def model_of(name: str) -> Model:
    if name == "convnet":
        return load_model(CONVNET, Sample((3, SIDE, SIDE), torch.float32), ["tests.convnet"])
    spec = plan_pb2.Run.Model(
        family=name.partition("-")[0], config_json=json.dumps((CONFIGS | MIXTURES | POSITIONS_IN_BUFFER)[name])
    )
    return load_model(spec, Sample((LENGTH,), torch.int64, VOCABULARY))


def batch_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "convnet":
        inputs, labels = images(4)
        return inputs, labels
    tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def stage_of(model: Model, first: int, past_last: int, seed: int = 5, dtype: torch.dtype = torch.float64) -> Stage:
    stage = build_stage(model, first, past_last, CPU, dtype)
    initialise_all(stage, seed)
    return stage


def train(stages: list[Stage], inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """One forward and backward through the stages, passing detached activations and their gradients as nodes do."""
    entered, left = [], []
    x = inputs
    for stage in stages:
        entered.append(x)
        if stage is not stages[-1]:
            left.append(stage.forward(x))
            x = left[-1].detach().requires_grad_()
    scored = stages[-1].loss(x, labels)
    torch.autograd.backward(scored.weighted)
    for number in range(len(stages) - 1, 0, -1):
        torch.autograd.backward(left[number - 1], entered[number].grad)
    return scored.mean.item()


@pytest.mark.parametrize("name", NAMES)
def test_stages_cut_anywhere_equal_the_whole_model(name: str) -> None:
    model = model_of(name)
    count = len(model.layers)
    inputs, labels = batch_of(name)
    whole = stage_of(model, 0, count)
    expected = train([whole], inputs, labels)
    cuts = [[0, cut, count] for cut in range(1, count)] + [list(range(count + 1))]
    for cut in cuts:
        stages = [stage_of(model, first, past) for first, past in itertools.pairwise(cut)]
        assert train(stages, inputs, labels) == pytest.approx(expected, rel=1e-12)
        for index, bucket in whole.buckets.items():
            parts = [stage.buckets[index].gradients for stage in stages if index in stage.buckets]
            torch.testing.assert_close(sum(parts), bucket.gradients, rtol=1e-12, atol=1e-14)
            holders = {
                number
                for number, s in enumerate(stages)
                for layer in bucket.spec.layers
                if s.first <= layer < s.past_last
            }
            assert len(parts) == len(holders)


@pytest.mark.parametrize("name", MIXTURES | POSITIONS_IN_BUFFER)
def test_stages_that_cannot_compute_in_float64_equal_the_whole_model(name: str) -> None:
    model = model_of(name)
    inputs, labels = batch_of(name)
    expected, apart = (
        train([stage_of(model, *ends, dtype=torch.float32) for ends in itertools.pairwise(cut)], inputs, labels)
        for cut in ([0, 5], [0, 2, 3, 5])
    )
    assert apart == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_stage_computes_what_transformers_computes(name: str) -> None:
    model = model_of(name)
    stage = stage_of(model, 0, len(model.layers))
    reference = type(model.module)(model.module.config).double()
    weights = {n: v for b in stage.buckets.values() for n, v in b.views(b.parameters).items()}
    assert not reference.load_state_dict(weights, strict=False).unexpected_keys
    inputs, _ = batch_of(name)
    torch.testing.assert_close(stage.forward(inputs), reference(input_ids=inputs).logits, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["gpt2", "convnet"])
def test_initial_values_depend_on_seed_and_bucket_only(name: str) -> None:
    model = model_of(name)
    whole = stage_of(model, 0, len(model.layers))
    for layer in range(len(model.layers)):
        alone = build_stage(model, layer, layer + 1, CPU, torch.float32)
        torch.manual_seed(layer)  # whatever the state of PyTorch's own randomness
        initialise_all(alone, 5)
        for index, bucket in alone.buckets.items():
            assert torch.equal(bucket.parameters.double(), whole.buckets[index].parameters)
    other = stage_of(model, 0, len(model.layers), seed=6)
    digests = [
        [bucket.digests()[0] for bucket in stage.buckets.values()]
        for stage in (other, whole, stage_of(model, 0, len(model.layers)))
    ]
    assert digests[0] != digests[1] == digests[2]


def test_initial_values_follow_the_familys_rules() -> None:
    model = model_of("gpt2")
    stage = stage_of(model, 0, len(model.layers))
    values = {n: v for b in stage.buckets.values() for n, v in b.views(b.parameters).items()}
    assert values["transformer.h.0.ln_1.weight"].eq(1).all()
    assert values["transformer.h.0.mlp.c_fc.bias"].eq(0).all()
    assert values["transformer.wte.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert values["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 6**0.5, rel=0.1)


def test_a_tied_parameter_has_a_bucket_of_its_own() -> None:
    model = model_of("gpt2")
    count = len(model.layers)
    assert count == SIZES["num_hidden_layers"] + 2
    assert model.buckets[count:] == (
        BucketSpec(count, (0, count - 1), (("transformer.wte.weight", (VOCABULARY, 32)),)),
    )
    assert [name for name, _ in model.buckets[0].parameters] == ["transformer.wpe.weight"]
    assert [name for name, _ in model.buckets[count - 1].parameters] == [
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    ]
    assert sorted(stage_of(model, 0, 2).buckets) == [0, 1, count]
    assert sorted(stage_of(model, 1, 2).buckets) == [1]
    assert sorted(stage_of(model, count - 1, count).buckets) == [count - 1, count]


@pytest.mark.parametrize("name", ["llama", "gpt2", "convnet"])
def test_every_parameter_is_in_one_bucket(name: str) -> None:
    model = model_of(name)
    names = [parameter for bucket in model.buckets for parameter, _ in bucket.parameters]
    assert sorted(names) == sorted(dict(model.module.named_parameters()))


def test_backward_accumulates_into_the_flat_gradients() -> None:
    model = model_of("gpt2")
    stage = stage_of(model, 0, len(model.layers))
    inputs, labels = batch_of("gpt2")
    train([stage], inputs, labels)
    once = {index: bucket.gradients.clone() for index, bucket in stage.buckets.items()}
    train([stage], inputs, labels)
    for index, bucket in stage.buckets.items():
        torch.testing.assert_close(bucket.gradients, 2 * once[index], rtol=1e-12, atol=0)
    stage.zero_gradients()
    train([stage], inputs, labels)
    for index, bucket in stage.buckets.items():
        assert torch.equal(bucket.gradients, once[index])


def test_a_stage_reads_its_parameters_from_the_flat_tensors() -> None:
    model = model_of("llama")
    stage = stage_of(model, 0, len(model.layers))
    inputs, _ = batch_of("llama")
    before = stage.forward(inputs)
    for bucket in stage.buckets.values():
        bucket.parameters.mul_(2)
    assert not torch.equal(stage.forward(inputs), before)


def test_a_new_stage_takes_over_the_buckets_it_is_given() -> None:
    model = model_of("llama")
    old = stage_of(model, 0, 3)
    new = build_stage(model, 1, 4, CPU, torch.float64, held=old.buckets)
    assert [index for index in new.buckets if new.buckets[index] is old.buckets.get(index)] == [1, 2]
    assert new.buckets[3].parameters.eq(0).all()
    inputs, _ = batch_of("llama")
    hidden = build_stage(model, 0, 1, CPU, torch.float64, held=old.buckets).forward(inputs)
    kept = build_stage(model, 1, 3, CPU, torch.float64, held=new.buckets)
    assert torch.equal(kept.forward(hidden), old.forward(inputs))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "convnet"])
def test_activation_shapes_are_those_of_the_stages(name: str) -> None:
    model = model_of(name)
    x, _ = batch_of(name)
    batch = x.shape[0]
    for layer in range(len(model.layers)):
        x = stage_of(model, layer, layer + 1).forward(x)
        assert (tuple(x.shape), x.dtype) == (model.activation_shape(layer, batch), torch.float64)


def test_dropout_is_off() -> None:
    model = model_of("gpt2")
    stage = stage_of(model, 0, len(model.layers))
    inputs, _ = batch_of("gpt2")
    assert torch.equal(stage.forward(inputs), stage.forward(inputs))
    assert model.module.training


def test_in_bfloat16_it_computes_with_a_copy_and_adds_gradients_up_in_float32() -> None:
    model = model_of("llama")
    plain, mixed = (
        build_stage(model, 0, len(model.layers), CPU, torch.float32, computes_in=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    inputs, labels = batch_of("llama")
    for stage in (plain, mixed):
        initialise_all(stage, 5)
    logits = mixed.forward(inputs)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), plain.forward(inputs), rtol=0.05, atol=0.02)
    train([plain], inputs, labels)
    for times in (1, 2):
        train([mixed], inputs, labels)
        for index, bucket in mixed.buckets.items():
            assert (bucket.parameters.dtype, bucket.gradients.dtype) == (torch.float32, torch.float32)
            expected = times * plain.buckets[index].gradients
            assert (bucket.gradients - expected).norm() < 0.03 * expected.norm()
    assert all(parameter.grad is None for parameters in mixed.parameters.values() for parameter in parameters)


@pytest.mark.parametrize("name", [*NAMES, *POSITIONS_IN_BUFFER])
def test_every_family_computes_in_bfloat16(name: str) -> None:
    model = model_of(name)
    exact = torch.float32 if name in POSITIONS_IN_BUFFER else torch.float64
    cuts = itertools.pairwise([0, 2, len(model.layers)])
    stages = [build_stage(model, *cut, CPU, torch.float32, computes_in=torch.bfloat16) for cut in cuts]
    for stage in stages:
        initialise_all(stage, 5)
    inputs, labels = batch_of(name)
    whole = stage_of(model, 0, len(model.layers), dtype=exact)
    assert train(stages, inputs, labels) == pytest.approx(train([whole], inputs, labels), rel=0.02)
    assert stages[0].forward(inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("cut", [[0, 5], [0, 1, 5], [0, 3, 5]])
@pytest.mark.parametrize("checkpointing", Checkpointing)
def test_layers_may_change_their_input_in_place(checkpointing: Checkpointing, cut: list[int]) -> None:
    """Wherever the model is cut, and though the layer before is computed again."""

    def gradients(in_place: bool, cut: list[int], checkpointing: Checkpointing) -> dict[int, torch.Tensor]:
        def make() -> nn.Sequential:
            deeper = nn.Sequential(nn.SiLU(inplace=in_place), nn.Linear(6, 6))
            return nn.Sequential(nn.Linear(4, 6), nn.SiLU(inplace=in_place), nn.Linear(6, 6), deeper, nn.Linear(6, 3))

        model = load_sequential(make, "a.b:c", Sample((4,), torch.float32))
        keeping = Keeping(checkpointing)
        stages = [build_stage(model, *ends, CPU, torch.float64, keeping=keeping) for ends in itertools.pairwise(cut)]
        for stage in stages:
            initialise_all(stage, 5)
        train(stages, torch.arange(12.0, dtype=torch.float64).view(3, 4), torch.tensor([0, 1, 2]))
        return {index: bucket.gradients for stage in stages for index, bucket in stage.buckets.items()}

    expected = gradients(False, [0, 5], Checkpointing.NONE)
    for index, mine in gradients(True, cut, checkpointing).items():
        torch.testing.assert_close(mine, expected[index], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_computed_again_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    model = model_of(name)
    inputs, labels = batch_of(name)
    losses, gradients = [], []
    for checkpointing in Checkpointing:
        stages = [
            build_stage(model, *cut, CPU, torch.float64, computes_in=dtype, keeping=Keeping(checkpointing))
            for cut in itertools.pairwise([0, 2, len(model.layers)])
        ]
        for stage in stages:
            initialise_all(stage, 5)
        losses.append(train(stages, inputs, labels))
        gradients.append([bucket.gradients for stage in stages for bucket in stage.buckets.values()])
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("checkpointing", Checkpointing)
@pytest.mark.parametrize(
    "name",
    [
        "convnet",
        "llama",
        *(pytest.param(n, marks=pytest.mark.soak) for n in ("gpt2", "gemma2", "opt", "qwen3_moe", "xglm")),
    ],
)
def test_a_stage_that_nobody_uses_any_more_is_freed_at_once(name: str, checkpointing: Checkpointing) -> None:
    """Without the garbage collector: a device has no room for an old stage beside the new one."""
    model, keeping = model_of(name), Keeping(checkpointing)
    dtype = torch.float32 if name in MIXTURES | POSITIONS_IN_BUFFER else torch.float64
    count = len(model.layers)
    stages = [
        build_stage(model, *cut, CPU, dtype, keeping=keeping) for cut in ((0, 1), (1, count - 1), (count - 1, count))
    ]
    for stage in stages:
        initialise_all(stage, 5)
    train(stages, *batch_of(name))
    tensors = [tensor for stage in stages for b in stage.buckets.values() for tensor in (b.parameters, b.gradients)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    alive += [weakref.ref(p) for stage in stages for mine in stage.parameters.values() for p in mine]
    gc.collect()
    gc.disable()
    try:
        del stage, stages, tensors
        assert [tensor() for tensor in alive if tensor() is not None] == []
    finally:
        gc.enable()


def _append_output(outputs: list[torch.Tensor], stage: Stage, x: torch.Tensor) -> None:
    outputs.append(stage.forward(x))


def test_a_checkpointed_stage_keeps_the_inputs_of_its_layers_alone() -> None:
    model = model_of("llama")
    kept: dict[Checkpointing, int] = {}
    for checkpointing in Checkpointing:
        stage = build_stage(model, 1, 4, CPU, torch.float64, keeping=Keeping(checkpointing))
        hidden = torch.randn(3, LENGTH, 32, dtype=torch.float64, requires_grad=True)
        outputs: list[torch.Tensor] = []
        kept[checkpointing] = left_allocated(partial(_append_output, outputs, stage, hidden))
    inputs = 3 * hidden.nbytes  # the first is not allocated by the stage, the output is
    assert inputs <= kept[Checkpointing.LAYER] < 1.2 * inputs
    assert kept[Checkpointing.NONE] > 5 * inputs


def test_state_in_the_hosts_memory_leaves_a_copy_of_the_weights_on_the_device() -> None:
    model = model_of("llama")
    on_device, on_host = Keeping(), Keeping(optimizer_state=OptimizerState.HOST)
    stage = build_stage(model, 1, 4, CPU, torch.float32, keeping=on_host)
    initialise_all(stage, 5)
    size = sum(bucket.spec.size for bucket in stage.buckets.values())
    assert stage.state_bytes == (4 * 2 * size, 4 * 3 * size)
    mixed = build_stage(model, 1, 4, CPU, torch.float32, computes_in=torch.bfloat16, keeping=on_host)
    assert mixed.state_bytes == (6 * size, 4 * 3 * size)
    hidden = torch.randn(3, LENGTH, 32)
    before = stage.forward(hidden)
    for bucket in stage.buckets.values():
        bucket.parameters.mul_(2)
    assert torch.equal(stage.forward(hidden), before)
    for index in stage.buckets:
        stage.refresh(index)
    assert not torch.equal(stage.forward(hidden), before)
    after = build_stage(model, 1, 4, CPU, torch.float32, keeping=on_device, held=stage.buckets)
    assert all(after.buckets[index] is bucket for index, bucket in stage.buckets.items())
    assert after.state_bytes == (4 * 4 * size, 0)
    assert torch.equal(after.forward(hidden), stage.forward(hidden))


@pytest.mark.parametrize("computes_in", [torch.float32, torch.bfloat16])
def test_a_stage_that_is_released_frees_its_weights_though_it_is_still_referred_to(computes_in: torch.dtype) -> None:
    stage = build_stage(model_of("llama"), 1, 4, CPU, torch.float32, computes_in=computes_in)
    initialise_all(stage, 5)
    stage.forward(torch.randn(3, LENGTH, 32)).sum().backward()  # type: ignore[no-untyped-call]
    held = stage.buckets  # a store holds this very dict
    weights = [weakref.ref(weight) for weight in stage.weights.values()]
    gradients = [weakref.ref(bucket.gradients) for bucket in held.values()]
    stage.release()
    stage.release()
    for bucket in held.values():
        bucket.forget_gradients()
    gc.collect()
    assert [each() for each in gradients] == [None] * 3
    own = [None] * 3 if computes_in is torch.bfloat16 else [bucket.parameters for bucket in held.values()]
    assert all(weight() is kept for weight, kept in zip(weights, own, strict=True))
    assert (len(held), stage.buckets) == (3, {})
