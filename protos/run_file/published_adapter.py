"""An adapter in a folder of peft, as its adapter_config.json describes it, and whether a run can train it further."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dtfm.protos.places import is_on_hub

_UNUSUAL = ("lora_bias", "rank_pattern", "alpha_pattern", "trainable_token_indices")
"""What a run does not train. Each is empty in adapters that a run can go on with."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """``base``: the model beside which it stands, with "@" and the commit if these are known. ``targets``: the modules that have
    an adapter, by the ends of their names, or "all-linear". ``train_also``: those that are trained whole beside it, likewise."""

    base: str
    rank: int
    alpha: float
    targets: tuple[str, ...] | str
    rs: bool
    dropout: float = 0.0
    train_also: tuple[str, ...] = ()
    dora: bool = False


class _Asked(Protocol):
    """What a run says of its adapter."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def rs(self) -> bool: ...
    @property
    def dora(self) -> bool: ...


def published_adapter(config: Mapping[str, Any], name: str) -> PublishedAdapter:
    """The adapter that the content of adapter_config.json describes. ``name``: its folder. Raises ValueError, to follow the key's
    name, for one that no run can train further."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{name} is an adapter of the kind {kind!r:.80}; only LoRA can be trained further")
    unusual = [key for key in _UNUSUAL if config.get(key)] + (["bias"] if config.get("bias", "none") != "none" else [])
    if unusual:
        raise ValueError(
            f"{name} has {unusual[0]} = {config[unusual[0]]!r:.80}, which runs do not train; merge it with its model "
            "(peft's merge_and_unload), and begin with that"
        )
    dropout = config.get("lora_dropout") or 0.0
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not isinstance(dropout, int | float):
        raise ValueError(
            f"{name} has no numbers as r, lora_alpha and lora_dropout in its adapter_config.json; copy it again"
        )
    if isinstance(targets, list) and all(isinstance(each, str) for each in targets):
        targets = tuple(sorted(targets))
    elif targets != "all-linear":
        raise ValueError(
            f"{name} names its targets by a pattern, {targets!r:.80}, which runs do not know; list them there"
        )
    also = config.get("modules_to_save") or []
    if not isinstance(also, list) or not all(isinstance(each, str) for each in also):
        raise ValueError(f"{name} has modules_to_save = {also!r:.80}, which is no list of names; copy it again")
    base, revision = str(config.get("base_model_name_or_path") or ""), str(config.get("revision") or "")
    if base and _COMMIT.fullmatch(revision) and "@" not in base:
        base = f"{base}@{revision}"
    return PublishedAdapter(
        base,
        rank,
        float(alpha),
        targets,
        bool(config.get("use_rslora")),
        float(dropout),
        tuple(sorted(also)),
        bool(config.get("use_dora")),
    )


def check_same(found: PublishedAdapter, asked: _Asked, name: str) -> None:
    """Raises ValueError if the adapter called ``name`` is of another kind than a run that begins with it has ``asked`` for."""
    said = {True: "true", False: "false"}
    for key, mine, theirs in (
        ("rank", asked.rank, found.rank),
        ("alpha", asked.alpha, found.alpha),
        ("rs", said[asked.rs], said[found.rs]),
        ("dora", said[asked.dora], said[found.dora]),
    ):
        if mine != theirs:
            raise ValueError(
                f"adapter.{key} = {mine}, but the adapter in {name} has {theirs}; set {key} = {theirs} in [adapter]"
            )


def check_base(found: PublishedAdapter, base: str, name: str) -> None:
    """Raises ValueError if the adapter called ``name`` is for another model on the hub than ``base``. Of folders, which may be
    copies, only the shapes tell."""
    theirs, mine = found.base.partition("@")[0], base.partition("@")[0]
    if theirs != mine and is_on_hub(theirs) and is_on_hub(mine):
        raise ValueError(
            f"adapter.pretrained: {name} is an adapter for another model, {theirs}; set model.pretrained to that, or name an "
            f"adapter for {mine}"
        )
