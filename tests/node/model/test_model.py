"""Models that cannot be trained here are refused with a message that names the reason."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from dtfm.node.data.samples import Sample
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.protos import plan_pb2
from tests.node.model.test_stage import CPU, SIZES, stage_of

TEXT = Sample((12,), torch.int64, 61)
IMAGES = Sample((3, 4, 4), torch.float32)


def causal_lm(family: str, config: Mapping[str, object], sample: Sample = TEXT) -> Model:
    return load_model(plan_pb2.Run.Model(family=family, config_json=json.dumps(config)), sample)


@pytest.mark.parametrize(
    ("family", "config", "complaint"),
    [
        (
            "lama",
            {},
            "model.family: 'lama' is not a causal language model of this node's transformers; similar names are llama",
        ),
        ("vit", {}, "model.family: 'vit' is not a causal language model"),
        ("", {}, "model.family: '' is not a causal language model"),
        ("llama", {"hiden_size": 32}, "model.config: 'llama' has no setting 'hiden_size'; did you mean 'hidden_size'"),
        ("llama", {"hidden_size": "wide"}, "model.config: 'llama' does not take it: .*hidden_size"),
        ("llama", {"hidden_size": 33, "num_attention_heads": 4}, "model.config: 'llama' does not take it: .*33.*heads"),
        (
            "mixtral",
            {"output_router_logits": True},
            "model.config.output_router_logits: the routers' auxiliary loss cannot be computed by a model that is cut",
        ),
        ("llama", {"num_hidden_layers": 0}, "model.config.num_hidden_layers: 0 is not between 1 and 4096"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is not between 1 and 4096"),
        ("llama", {"vocab_size": 60}, "model.config.vocab_size: 60 is less than the tokenizer's 61; leave it out"),
        ("gpt2", {"n_positions": 11}, "model.config.n_positions: 11 is less than data.sequence_length 12"),
        ("llama", {"auto_map": {"AutoConfig": "x--y.Z"}}, "has no setting 'auto_map'"),
        ("llama", {"_attn_implementation": "someone/kernel"}, "has no setting '_attn_implementation'"),
        ("llama", {"hidden_act": "nope"}, "model.config: 'llama' cannot be built from it: .*nope"),
    ],
)
def test_an_impossible_config_is_refused(family: str, config: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        causal_lm(family, config)


@pytest.mark.parametrize(("text", "complaint"), [("{", "not JSON"), ("[1]", "must be a table of settings, not list")])
def test_a_config_that_is_not_a_table_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"model.config: {complaint}"):
        load_model(plan_pb2.Run.Model(family="llama", config_json=text), TEXT)


def test_a_language_model_needs_text() -> None:
    with pytest.raises(ValueError, match=r"'llama' reads text, but data.source gives inputs of shape \[3, 4, 4\]"):
        causal_lm("llama", {}, IMAGES)


def test_the_vocabulary_is_the_tokenizers_unless_given() -> None:
    small = SIZES | {"num_hidden_layers": 1}
    assert causal_lm("llama", small).layers[-1].output == (12, 61)
    assert causal_lm("llama", small | {"vocab_size": 64}).layers[-1].output == (12, 64)


def test_a_family_that_is_more_than_a_chain_of_layers_is_refused() -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config |= {"num_key_value_heads": 1, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 61}
    with pytest.raises(
        ValueError, match=r"model.family: 'gemma3n_text' cannot be cut into layers: .*; choose another family"
    ):
        causal_lm("gemma3n_text", config)


class Bare(nn.Module):
    """Has a parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Offset(Bare):
    """Sets only part of its parameter."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale[:2] = 1


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


def frozen() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 2)).requires_grad_(False)


def tied() -> nn.Sequential:
    first, last = nn.Linear(48, 48, bias=False), nn.Linear(48, 48)
    last.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), last)


MAKERS: dict[str, tuple[Callable[[], object], str]] = {
    "nothing": (lambda: None, "returned NoneType, not an nn.Sequential with children"),
    "empty": (nn.Sequential, "returned Sequential, not an nn.Sequential with children"),
    "failing": (lambda: 1 / 0, "failed: ZeroDivisionError: division by zero"),
    "norm": (lambda: nn.Sequential(nn.BatchNorm2d(3)), "BatchNorm2d at '0', whose running statistics .* use GroupNorm"),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.1)), r"Dropout\(p=0.1\) at '0'; dropout is not supported, use p=0"),
    "bare": (lambda: nn.Sequential(Bare()), r"a Bare at '0' with parameters but without reset_parameters\(\)"),
    "shape": (lambda: nn.Sequential(nn.Linear(5, 2)), r"layer '0' .* does not take an input of shape \(2, 3, 4, 4\)"),
    "pair": (lambda: nn.Sequential(Two()), r"layer '0' .* must return one floating-point tensor with the batch first"),
    "batch": (lambda: nn.Sequential(nn.Flatten(0)), r"with the batch first, but .* it returned \(96,\)"),
    "frozen": (frozen, "parameter 1.weight has requires_grad=False"),
}
maker: Callable[[], object] = frozen


def made() -> object:
    """The function that model.module names in these tests."""
    return maker()


def sequential(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch, allowed: str = __name__) -> Model:
    monkeypatch.setattr(f"{__name__}.maker", make)
    return load_model(plan_pb2.Run.Model(family="module", module=f"{__name__}:made"), IMAGES, [allowed])


@pytest.mark.parametrize("name", MAKERS)
def test_a_module_that_nodes_cannot_share_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, complaint = MAKERS[name]
    with pytest.raises(ValueError, match=complaint):
        sequential(make, monkeypatch)


@pytest.mark.parametrize("allowed", [__name__, f"{__name__}:made"])
def test_an_allowed_module_is_run(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequential(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), monkeypatch, allowed)
    assert [layer.output for layer in model.layers] == [(48,), (2,)]
    assert all(parameter.is_meta for parameter in model.module.parameters())


@pytest.mark.parametrize("allowed", ["", "tests", f"{__name__}:other", f"{__name__}x"])
def test_a_module_that_is_not_allowed_is_not_run(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=f"model.module: this node does not run code from .* --allow-module {__name__}"
    ):
        sequential(lambda: pytest.fail("was run"), monkeypatch, allowed)


@pytest.mark.parametrize("path", ["", ":", "os", "os.path:", "../x:y", "a b:c"])
def test_a_malformed_module_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"model.module: .* is not of the form package.module:function"):
        load_model(plan_pb2.Run.Model(family="module", module=path), IMAGES, [path])


def test_a_parameter_that_is_not_initialised_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequential(lambda: nn.Sequential(Offset()), monkeypatch)
    with pytest.raises(ValueError, match=r"parameter 0.scale is not set by the model's own initialisation"):
        stage_of(model, 0, 1)


def test_a_weight_tied_between_modules_is_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequential(tied, monkeypatch)
    assert [(b.layers, [name for name, _ in b.parameters]) for b in model.buckets if b.parameters] == [
        ((3,), ["3.bias"]),
        ((1, 3), ["1.weight"]),
    ]
    stage = stage_of(model, 0, 4)
    weight = stage.buckets[4].parameters.view(48, 48)
    x = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    expected = (x.flatten(1) @ weight.T).tanh() @ weight.T + stage.buckets[3].parameters
    torch.testing.assert_close(stage.forward(x), expected)
    bound = 1 / math.sqrt(48)
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert stage.device == CPU
