"""The settings that go home with the weights: config.json and generation_config.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dtfm.node.model.causal.older_readers import with_older_names
from dtfm.protos.published_files import CONFIG, GENERATION

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_config(
    module: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    special_ids: Mapping[str, int],
    generation: Mapping[str, Any] | None,
) -> None:
    """Writes both files into a local folder. ``generation``: the content of the generation_config.json beside the weights that
    the run began with. ``special_ids``: the tokenizer's ids, for keys that neither file has."""
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = dtype
    config.use_cache = True  # off for training; makes generation fast
    config.save_pretrained(folder)
    written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    known = with_special_ids(written, special_ids)
    _write(folder / CONFIG, with_older_names(known))
    if how := generation_settings(written, special_ids, generation):
        _write(folder / GENERATION, how)


def generation_settings(
    config: Mapping[str, Any], special_ids: Mapping[str, int], generation: Mapping[str, Any] | None
) -> dict[str, Any]:
    """How the model writes text, as generation_config.json has it. ``config``: the content of config.json."""
    how = dict(generation or {})
    ids = {key: number for key in TOKEN_IDS if (number := _first(how, config, special_ids, key=key)) is not None}
    return how | ids


def with_special_ids(config: Mapping[str, Any], special_ids: Mapping[str, int]) -> dict[str, Any]:
    """``config`` with the ids that it does not have. A model learns nothing about the token that its config calls padding. So a
    token with another meaning does not become the padding token."""
    found = dict(config)
    for key in TOKEN_IDS:
        number = special_ids.get(key)
        others = [special_ids.get(other) for other in TOKEN_IDS if other != key]
        if found.get(key) is None and number is not None and not (key == "pad_token_id" and number in others):
            found[key] = number
    return found


def _first(*told: Mapping[str, Any], key: str) -> Any:
    """The value of the first that has the key; None if none has it."""
    return next((each[key] for each in told if each.get(key) is not None), None)


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
