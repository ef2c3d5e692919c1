"""From a run's model family and settings to a transformers config and the whole model, with parameters on meta."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dtfm.node.data.problems import in_one_line
from dtfm.node.data.samples import Sample
from dtfm.node.model.model import parameters_on_meta

log = logging.getLogger(__name__)

MOST_LAYERS = 4096
_ROUTERS = "output_router_logits"
# Old names of rotary settings, which configs accept but do not list.
_ROTARY_KEYS = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
# Settings that we decide, or that mean nothing for training from scratch.
_RESERVED_KEYS = frozenset({"dtype", "torch_dtype", "model_type", "architectures", "auto_map", "transformers_version"})
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def configure(
    family: str, config_json: str, sample: Sample, pretrained: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """The family's config with the given settings, a JSON object. ``pretrained`` is the content of a config.json, if the run
    loads weights. Then the family and the settings may be left out.

    Dropout is set to 0: a step must not depend on which node computes it. ``vocab_size`` defaults to the tokenizer's.

    Raises:
        ValueError: unknown family, unknown setting, or an impossible value.
    """
    if pretrained is not None:
        family = _pretrained_family(family, pretrained)
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = get_close_matches(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) or ["llama", "gpt2"]
        raise ValueError(
            f"model.family: {family!r} is not a causal language model of this node's transformers; "
            f"similar names are {', '.join(near)} (or update transformers)"
        )
    if len(sample.shape) != 1 or sample.vocabulary is None:
        raise ValueError(
            f"model.family: {family!r} reads text, but data.source gives inputs of shape {list(sample.shape)}"
        )
    given = _settings(family, config_json)
    try:
        if pretrained is not None:
            config = type(AutoConfig.for_model(family)).from_dict(dict(pretrained))
        else:
            defaults = dict.fromkeys(_TOKEN_KEYS) | {"vocab_size": sample.vocabulary, "use_cache": False}
            config = AutoConfig.for_model(family, **(defaults | given))
    except Exception as problem:
        raise ValueError(f"model.config: {family!r} does not take it: {in_one_line(problem)}") from problem
    if pretrained is not None:
        if _ROUTERS in given:  # this alone says how to train, not what
            setattr(config, _ROUTERS, given.pop(_ROUTERS))
        _check_no_conflict(config, given)
        config.dtype, config.use_cache = torch.float32, False
    for key, value in config.to_dict().items():
        if ("drop" in key or "jitter" in key) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, key, 0.0)
    _check_sizes(config, sample.shape[0], sample.vocabulary)
    _check_routers(config)
    return config


def _pretrained_family(family: str, pretrained: Mapping[str, Any]) -> str:
    found = pretrained.get("model_type")
    if not isinstance(found, str) or (family and family != found):
        raise ValueError(
            f"model.family: {family!r} is given, but model.pretrained is a {found!r}; leave model.family out"
        )
    if pretrained.get("quantization_config"):
        raise ValueError("model.pretrained: its weights are quantised, and cannot be trained; give unquantised ones")
    return found


def text_tower(pretrained: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of the causal language model in a model that also reads images or sounds, such as Gemma 3's. None if the
    content of config.json, ``pretrained``, describes no such model."""
    inner = pretrained.get("text_config")
    if not isinstance(inner, dict):
        return None
    try:
        whole = type(AutoConfig.for_model(pretrained["model_type"])).from_dict(dict(pretrained))
        found: dict[str, Any] = whole.get_text_config(decoder=True).to_dict()
    except Exception:  # whatever transformers raises; it is refused as a model of that family
        return None
    if found.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    for key in ("tie_word_embeddings", "quantization_config", *_TOKEN_KEYS):
        if inner.get(key) is None and pretrained.get(key) is not None:
            found[key] = pretrained[key]
    return found


def _check_no_conflict(config: PretrainedConfig, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if (there := getattr(config, key, None)) != value:
            raise ValueError(
                f"model.config.{key}: {value!r} is given, but model.pretrained has {there!r}; leave it out"
            )


def build(config: PretrainedConfig) -> PreTrainedModel:
    """The whole model. Raises transformers' own exception if transformers cannot build a model from the config."""
    make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    with parameters_on_meta():  # of attention, transformers takes the fused one, where the family has it
        return make(config, attn_implementation=None, trust_remote_code=False)


def _settings(family: str, config_json: str) -> dict[str, Any]:
    try:
        given = json.loads(config_json or "{}")
    except (json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"model.config: not JSON: {problem}") from None
    if not isinstance(given, dict):
        raise ValueError(f"model.config: must be a table of settings, not {type(given).__name__}")
    default = AutoConfig.for_model(family)
    known = (set(default.to_dict()) | set(default.attribute_map) | _ROTARY_KEYS) - _RESERVED_KEYS
    for key in given:
        if (key not in known and not _is_read(family, key)) or key.startswith("_"):
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise ValueError(f"model.config: {family!r} has no setting {key!r}; {hint}")
    return given


def _is_read(family: str, key: str) -> bool:
    """Whether the family's own code looks for a setting that its config does not list, such as Qwen3-MoE's head_dim."""
    place = type(AutoConfig.for_model(family)).__module__.replace("configuration_", "modeling_")
    try:
        return f'getattr(config, "{key}"' in inspect.getsource(importlib.import_module(place))
    except (ImportError, OSError):
        return False


def _check_routers(config: PretrainedConfig) -> None:
    """Raises ValueError if the config asks for transformers' auxiliary loss (output_router_logits). That loss is a product of
    means over all layers, so no stage could compute its part alone."""
    if getattr(config, _ROUTERS, False):
        raise ValueError(
            f"model.config.{_ROUTERS}: the routers' auxiliary loss cannot be computed by a model that is cut into stages. Set it "
            "to false to train the routers by the model's own loss alone, or choose a family without experts"
        )
    if getattr(config, "router_aux_loss_coef", None):
        log.warning("the experts' routers are trained without their auxiliary loss, by the model's own loss alone")


def _check_sizes(config: PretrainedConfig, length: int, vocabulary: int) -> None:
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        value = getattr(config, name, None)
        if not isinstance(value, int):
            raise ValueError(
                f"model.config.{name}: {value!r} is not a whole number; give one, or choose another model.family"
            )
    if config.vocab_size < vocabulary:
        raise ValueError(
            f"model.config.vocab_size: {config.vocab_size} is less than the tokenizer's {vocabulary}; leave it out"
        )
    layers, positions = config.num_hidden_layers, getattr(config, "max_position_embeddings", None)
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"model.config.num_hidden_layers: {layers} is not between 1 and {MOST_LAYERS}")
    if isinstance(positions, int) and positions < length:
        name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ValueError(
            f"model.config.{name}: {positions} is less than data.sequence_length {length}; raise the one or lower the other"
        )
