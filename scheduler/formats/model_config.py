"""The settings of a language model that transformers refuses, for a machine without transformers.

The checks and the sentences are transformers' own for these families; tests compare both. Some settings fail in transformers
only when the model computes; then the sentence is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, type] = {
    "initializer_range": float,
    "rms_norm_eps": float,
    "max_position_embeddings": int,
    "tie_word_embeddings": bool,
}
"""Settings that have to be of exactly this type."""
_WITH_BIAS = ("llama", "qwen3")
"""Families that have attention_bias."""
_KEYS_OF_ROPE: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""By kind of rotary embedding, what has to be said of it."""
_MOST_UNCHECKED = 4
"""Up to this size transformers lets heads be odd."""


class NoSuchModel(ValueError):
    """transformers builds no model from these settings, or a model that cannot compute."""


def check_model(family: str, config: Mapping[str, Any], hidden: int, heads: int, key_heads: int, head: int) -> None:
    """Raises NoSuchModel if transformers refuses the settings. ``head``: the size of a head, as given or derived."""
    if sentence := _refused(family, config, hidden, heads, head):
        raise NoSuchModel(f"model.config: {family!r} does not take it: {sentence}")
    if heads % key_heads:
        raise NoSuchModel(
            f"model.config: num_attention_heads is {heads}, which is not a multiple of num_key_value_heads, {key_heads}: each of "
            "the latter serves as many of the former"
        )
    if head % 2:
        raise NoSuchModel(
            f"model.config: a head has {head} numbers, and rotary embeddings turn pairs: give an even head_dim"
        )
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), Mapping):
            _check_rope(f"model.config.{key}", rope)


def _check_rope(key: str, rope: Mapping[str, Any]) -> None:
    """Raises NoSuchModel for a kind of rotary embedding that transformers does not know, or of which it needs to know more."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KEYS_OF_ROPE:
        raise NoSuchModel(f"{key}: transformers knows no rope_type {kind!r}; choose one of {', '.join(_KEYS_OF_ROPE)}")
    if missing := [name for name in _KEYS_OF_ROPE[kind] if name not in rope]:
        raise NoSuchModel(f"{key}: rope_type {kind!r} needs {' and '.join(missing)} as well")


def _refused(family: str, config: Mapping[str, Any], hidden: int, heads: int, head: int) -> str:
    """transformers' sentence. Empty: transformers builds the model."""
    types = {**_TYPES, **({"attention_bias": bool} if family in _WITH_BIAS else {})}
    for key, wanted in types.items():
        if key in config and type(value := config[key]) is not wanted:
            return f"Field {key!r} expected {wanted.__name__}, got {type(value).__name__} (value: {value!r:.80})"
    spread = config.get("initializer_range", 0.0)
    if family == "llama" and not 0.0 <= spread <= 1.0:
        return f"Value must be greater or equal to 0.0 and smaller or equal to 1.0, got {spread}."
    if spread < 0:
        return f"normal expects std >= 0.0, but found std {spread:g}"
    if family == "llama" and hidden % heads:
        return f"The hidden size ({hidden}) is not a multiple of the number of attention heads ({heads})."
    is_known = family != "qwen2" or "head_dim" in config
    if is_known and head > _MOST_UNCHECKED and head % 2:
        return (
            f"RoPE requires an even rotary dimension, but got `head_dim`={head} with `partial_rotary_factor`=1.0 for "
            "`full_attention`."
        )
    return ""
