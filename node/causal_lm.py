"""Any transformers causal language model, cut between its decoder layers.

Layer 0 is the embedding, layers 1 to N the decoder layers, layer N + 1 the final norm and the head. A stage runs the
family's own forward on a copy of the model in which only its layers are real. What comes before the decoder layers (masks,
rotary embeddings) has no parameters and is computed by every stage; modules of other stages stand aside.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dtfm.node.model import Forward, Layer, Model, parameters_on_meta
from dtfm.node.samples import Sample

MOST_LAYERS = 4096
# Old names of rotary settings, which configs take but do not list.
_ROTARY_KEYS = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
# Ours to decide, or of no meaning for training from scratch.
_RESERVED_KEYS = frozenset({"dtype", "torch_dtype", "model_type", "architectures", "auto_map", "transformers_version"})
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class CausalLM(Model):
    def __init__(self, module: PreTrainedModel, sample: Sample, trace: _Trace) -> None:
        super().__init__(module, sample, trace.layers)
        self._decoder = trace.decoder
        self._embedding, self._head = trace.layers[0].roots, trace.layers[-1].roots
        self._returns_tuple = trace.returns_tuple

    def cut(self, module: nn.Module, first: int, past_last: int) -> Forward:
        assert isinstance(module, PreTrainedModel)
        decoder = module.get_submodule(self._decoder)
        assert isinstance(decoder, nn.ModuleList)
        for number, layer in enumerate(decoder, start=1):
            if not first <= number < past_last:
                layer.forward = self._pass_on  # on this instance: its attributes, which some families read, stay
        enters, leaves = first > 0, past_last < len(self.layers)
        needed = (() if enters else self._embedding) + (() if leaves else self._head)
        for name in {*self._embedding, *self._head}.difference(needed):
            module.get_submodule(name).forward = self._stand_in
        return _Slice(module, decoder, enters, leaves)

    def initialise_module(self, module: nn.Module) -> None:
        assert isinstance(self.module, PreTrainedModel)
        self.module._init_weights(module)  # type: ignore[no-untyped-call]

    def save_config(self, folder: Path, dtype: torch.dtype) -> None:
        assert isinstance(self.module, PreTrainedModel)
        config = copy.deepcopy(self.module.config)
        config.architectures = [type(self.module).__name__]
        config.dtype = dtype
        config.save_pretrained(folder)

    def _pass_on(self, hidden_states: torch.Tensor, *_args: object, **_keywords: object) -> Any:
        return (hidden_states,) if self._returns_tuple else hidden_states

    def _stand_in(self, *args: object, **keywords: object) -> torch.Tensor:
        """Takes the place of a module of the embedding or head in stages without it; its value is not used."""
        given = next(x for x in (*args, *keywords.values()) if isinstance(x, torch.Tensor))
        if given.ndim >= 3:  # hidden states
            return given
        return torch.zeros(*given.shape, self.layers[0].output[-1], device=given.device)  # token ids, positions


class _Slice:
    """Calls the model with the hidden states slipped in before its first decoder layer or taken out after the last."""

    def __init__(self, module: PreTrainedModel, decoder: nn.ModuleList, enters: bool, leaves: bool) -> None:
        self._module, self._enters, self._leaves = module, enters, leaves
        self._hidden: torch.Tensor | None = None
        if enters:
            decoder[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        if leaves:
            decoder[-1].register_forward_hook(self._leave)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._hidden = x
        # Not x itself, which families may change in place on the way to the first decoder layer.
        given = {"inputs_embeds": torch.zeros_like(x)} if self._enters else {"input_ids": x}
        if not self._leaves:
            self._hidden = self._module(**given, use_cache=False).logits
        else:
            self._module.base_model(**given, use_cache=False)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden

    def _enter(self, _layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if args:
            return (self._hidden, *args[1:]), keywords
        return args, keywords | {"hidden_states": self._hidden}

    def _leave(self, _layer: nn.Module, _args: object, output: Any) -> None:
        self._hidden = _hidden_of(output)


def load_causal_lm(family: str, config_json: str, sample: Sample) -> CausalLM:
    """The causal LM of that transformers model_type and config, for samples of token ids (shape [sequence_length]).

    Dropout is set to 0: a step must not depend on who computes it. ``vocab_size`` is the tokenizer's unless given.

    Raises:
        ValueError: unknown family, a config that it does not take, or one whose layers cannot be separated.
    """
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = get_close_matches(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) or ["llama", "gpt2"]
        raise ValueError(
            f"model.family: {family!r} is not a causal language model of this node's transformers; "
            f"near it are {', '.join(near)} (or update transformers)"
        )
    if len(sample.shape) != 1 or sample.vocabulary is None:
        raise ValueError(
            f"model.family: {family!r} reads text, but data.source gives inputs of shape {list(sample.shape)}"
        )
    config = _config(family, config_json, sample)
    try:
        with parameters_on_meta():
            module = _from_config(config)
        trace = _trace(module, sample)
    except _NotSeparable as problem:
        raise ValueError(
            f"model.family: {family!r} cannot be cut into layers: {problem}; choose another family"
        ) from None
    except Exception as problem:
        raise ValueError(f"model.config: {family!r} cannot be built from it: {_first_line(problem)}") from problem
    return CausalLM(module, sample, trace)


class _NotSeparable(Exception):
    pass


@dataclass
class _Trace:
    """What one pass over the whole model, without numbers, shows."""

    decoder: str
    layers: tuple[Layer, ...] = ()
    returns_tuple: bool = False
    calls: dict[str, set[int]] = field(default_factory=dict)  # which layers call a module with parameters of its own
    flops: list[float] = field(default_factory=list)


def _config(family: str, config_json: str, sample: Sample) -> PretrainedConfig:
    assert sample.vocabulary is not None
    try:
        given = json.loads(config_json or "{}")
    except json.JSONDecodeError as problem:
        raise ValueError(f"model.config: not JSON: {problem}") from None
    if not isinstance(given, dict):
        raise ValueError(f"model.config: must be a table of settings, not {type(given).__name__}")
    default = AutoConfig.for_model(family)
    known = (set(default.to_dict()) | set(default.attribute_map) | _ROTARY_KEYS) - _RESERVED_KEYS
    for key in given:
        if key not in known or key.startswith("_"):
            near = get_close_matches(key, known, n=1)
            raise ValueError(
                f"model.config: {family!r} has no setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    settings = dict.fromkeys(_TOKEN_KEYS) | {"vocab_size": sample.vocabulary, "use_cache": False} | given
    try:
        config = AutoConfig.for_model(family, **settings)
    except Exception as problem:
        raise ValueError(f"model.config: {family!r} does not take it: {_first_line(problem)}") from problem
    for key in list(config.to_dict()):
        if "drop" in key or "jitter" in key:
            value = getattr(config, key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(config, key, 0.0)
    if config.vocab_size < sample.vocabulary:
        raise ValueError(
            f"model.config.vocab_size: {config.vocab_size} is less than the tokenizer's {sample.vocabulary}; leave it out"
        )
    layers, positions = config.num_hidden_layers, getattr(config, "max_position_embeddings", None)
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"model.config.num_hidden_layers: {layers} is not between 1 and {MOST_LAYERS}")
    if isinstance(positions, int) and positions < sample.shape[0]:
        name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ValueError(
            f"model.config.{name}: {positions} is less than data.sequence_length {sample.shape[0]}; raise the one or lower "
            "the other"
        )
    return config


def _from_config(config: PretrainedConfig) -> PreTrainedModel:
    make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    try:
        return make(config, attn_implementation="sdpa", trust_remote_code=False)
    except ValueError as problem:
        if "attention" not in str(problem):
            raise
        return make(config, attn_implementation="eager", trust_remote_code=False)


def _decoder_name(module: PreTrainedModel) -> str:
    """The name of the list of decoder layers: the outermost one with as many modules as the config has layers."""
    count: int = module.config.num_hidden_layers
    lists: list[str] = [n for n, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    depth = min((name.count(".") for name in lists), default=0)
    lists = [name for name in lists if name.count(".") == depth]
    if len(lists) != 1:
        raise _NotSeparable(f"it has {len(lists)} lists of {count} layers")
    return lists[0]


def _trace(module: PreTrainedModel, sample: Sample) -> _Trace:
    """Follows two samples through the model without computing: who is called before, in and after the decoder layers,
    and at what cost. Attention is counted as its two matrix products, whatever kernel will compute it."""
    batch = 2
    whole = copy.deepcopy(module)
    whole.config._attn_implementation = "eager"
    whole.config._experts_implementation = "batched_mm"  # the one whose shapes do not depend on values
    trace = _Trace(_decoder_name(whole))
    decoder = whole.get_submodule(trace.decoder)
    assert isinstance(decoder, nn.ModuleList)
    count, current = len(decoder), 0
    counter = FlopCounterMode(display=False)

    def enter(layer: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        nonlocal current
        if current == 0:
            trace.flops.append(counter.get_total_flops())
        current += 1
        if current > count or layer is not decoder[current - 1]:
            raise _NotSeparable("its layers are not called one after another")
        others = pytree.tree_leaves((args[1:], {k: v for k, v in keywords.items() if args or k != "hidden_states"}))
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in others):
            raise _NotSeparable("more than hidden states flows between its layers")

    def leave(_layer: nn.Module, _args: object, output: Any) -> None:
        trace.flops.append(counter.get_total_flops())
        trace.returns_tuple = isinstance(output, tuple)
        if _hidden_of(output).shape[:2] != (batch, *sample.shape):
            raise _NotSeparable("its layers do not return hidden states alone")
        between.add(current)

    between: set[int] = set()
    names = {id(m): n for n, m in whole.named_modules()}

    def called(part: nn.Module, _args: object) -> None:
        layer = count + 1 if current in between and current == count else current
        if current in between and current < count:
            raise _NotSeparable(f"{names[id(part)]} is called between its layers")
        trace.calls.setdefault(names[id(part)], set()).add(layer)

    for part in whole.modules():
        if any(True for _ in part.parameters(recurse=False)):
            part.register_forward_pre_hook(called)
    for layer in decoder:
        layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        layer.register_forward_hook(leave)
    # Fake tensors on the CPU rather than plain ones on meta: transformers then skips the checks that read values.
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        _fake(whole)
        whole(input_ids=torch.zeros(batch, *sample.shape, dtype=torch.int64), use_cache=False)
    if current != count:
        raise _NotSeparable(f"{current} of its {count} layers were called")
    trace.flops.append(counter.get_total_flops())
    _layers(trace, whole, sample, batch)
    return trace


def _fake(module: nn.Module) -> None:
    """Under a FakeTensorMode: parameters that have a device and a shape, but no memory."""
    fakes: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                part._parameters[name] = fakes.setdefault(
                    id(old), nn.Parameter(torch.empty(old.shape, dtype=old.dtype))
                )


def _layers(trace: _Trace, whole: PreTrainedModel, sample: Sample, batch: int) -> None:
    """Gives every parameter to the layers that use it."""
    count = whole.config.num_hidden_layers
    roots: list[list[str]] = [[] for _ in range(count + 2)]
    inside = tuple(f"{trace.decoder}.{number}." for number in range(count))
    for number, prefix in enumerate(inside, start=1):
        roots[number].append(prefix[:-1])
    for name, part in whole.named_modules():
        if name.startswith(inside) or next(part.parameters(recurse=False), None) is None:
            continue
        users = trace.calls.get(name, set())
        if not users or not users <= {0, count + 1}:
            raise _NotSeparable(
                f"{name or 'the model'} has parameters that are used outside of embedding, layers and head"
            )
        for number in users:
            roots[number].append(name)
    hidden, vocabulary = whole.config.hidden_size, whole.config.vocab_size
    names = ["embedding", *(f"layer {number}" for number in range(1, count + 1)), "head"]
    flops = [(end - begin) / batch for begin, end in zip([0.0, *trace.flops[:-1]], trace.flops, strict=True)]
    trace.layers = tuple(
        Layer(
            name,
            tuple(
                f"{root}.{parameter}"
                for root in roots[number]
                for parameter, _ in whole.get_submodule(root).named_parameters(remove_duplicate=False)
            ),
            tuple(roots[number]),
            (*sample.shape, vocabulary if number == count + 1 else hidden),
            flops[number],
        )
        for number, name in enumerate(names)
    )


def _hidden_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def _first_line(problem: Exception) -> str:
    return " ".join(line.strip() for line in str(problem).splitlines() if line.strip())[:300] or type(problem).__name__
