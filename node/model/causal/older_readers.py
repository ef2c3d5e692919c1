"""The settings that config.json has twice: transformers 5 renamed some, and other programs look for the old names.

Without the older names transformers 4, vLLM and llama.cpp's converter silently take their own defaults: they compute a model
with a rotary base of 1,000,000 with 10,000.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers. If their rotary settings differ, ``rope_parameters`` has a table for each kind."""

_THETA = {"gpt_neox": "rotary_emb_base", "gpt_neox_japanese": "rotary_emb_base"}
_PARTIAL = {"gpt_neox": "rotary_pct", "gpt_neox_japanese": "rotary_pct"}
"""By family, its own names of the rotary base and of the part of a head that is rotated."""

_OF_FULL = {"modernbert-decoder": "global_rope_theta"}
_OF_SLIDING = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "modernbert-decoder": "local_rope_theta",
}
"""By family, its names of the base in layers with full and with sliding attention."""

_TYPE = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "olmo", "olmo2", "phi3", "phi4_multimodal"})
"""Families whose scaling has ``type`` instead of ``rope_type``, and nothing beside the factors."""


def with_older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config``, the content of a config.json of transformers 5, with its settings repeated under the older names."""
    found = dict(config)
    if "dtype" in found:
        found["torch_dtype"] = found["dtype"]
    family = str(found.get("model_type"))
    if family == "gpt2" and "n_positions" in found:
        found.setdefault("n_ctx", found["n_positions"])
    if family == "gemma" and "hidden_act" in found:
        found["hidden_activation"] = found["hidden_act"]
    rotary = found.get("rope_parameters")
    if isinstance(rotary, dict) and rotary:
        by_kind = {kind: each for kind, each in rotary.items() if isinstance(each, dict)}
        found |= _by_kind(family, by_kind) if FULL in by_kind or SLIDING in by_kind else _older(family, rotary)
    return found


def _older(family: str, rotary: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of all layers."""
    theta, partial = rotary.get("rope_theta"), rotary.get("partial_rotary_factor")
    kind = rotary.get("rope_type", "default")
    named = {name: value for name, value in rotary.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if family in _TYPE:
        named = {name: value for name, value in named.items() if name != "original_max_position_embeddings"}
        named["type"] = named.pop("rope_type", kind)
    older: dict[str, Any] = {"rope_scaling": None if kind == "default" else named}
    if theta is not None:
        older |= dict.fromkeys(("rope_theta", _THETA.get(family, "rope_theta")), theta)
    if partial is not None:
        older |= dict.fromkeys(("partial_rotary_factor", _PARTIAL.get(family, "partial_rotary_factor")), partial)
    return older


def _by_kind(family: str, rotary: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The rotary settings if layers differ in them. Older readers have one scaling: full attention's."""
    full, sliding = rotary.get(FULL), rotary.get(SLIDING)
    older = _older(family, full or sliding or {})
    theta = older.get("rope_theta")
    local = (sliding or {}).get("rope_theta", theta)
    older |= {_OF_FULL.get(family, "rope_theta"): theta}
    if family in _OF_SLIDING:
        older |= {_OF_SLIDING[family]: local}
    elif local != theta:
        log.warning(
            "config.json: layers of %s have rotary bases of %s and %s; transformers 4 knows the first alone",
            family,
            theta,
            local,
        )
    return older
