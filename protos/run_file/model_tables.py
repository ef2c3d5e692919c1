"""The tables of the run file that say what is trained: the model, and an adapter beside it."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from dtfm.protos.places import check_url
from dtfm.protos.run_file.table import Table

DEFAULT_LLAMA = {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 384}


def _usable(place: str) -> str:
    """The place of published files. Raises ValueError for a URL that cannot be read."""
    if "://" in place or "::" in place:
        check_url(place)
    return place


class Model(Table):
    """The model: the transformers library builds it from a configuration, or it is your own `torch.nn.Sequential`."""

    pretrained: str = Field(
        default="",
        max_length=4096,
        description="The weights to begin with, as transformers' save_pretrained writes them (config.json and safetensors): a "
        'folder, a URL (its kinds are those of `checkpoint.uri`), or a name on the Hugging Face hub, like "NAME" or '
        '"NAME@REVISION". Each node reads only its own layers. The folder of another run on the coordinator\'s disk '
        "(dtfm-runs/NAME, or one of its steps) needs no copies: nodes read the newest weights there from the coordinator. "
        "Without this key, the weights follow from `seed`.",
    )
    family: str = Field(
        default_factory=lambda known: "" if known.get("pretrained") else "llama",
        max_length=64,
        description='The model_type of a causal language model in transformers, like "llama" or "gpt2"; or "module". Default: '
        "llama, or the family of `pretrained`.",
    )
    config: dict[str, Any] = Field(
        default_factory=lambda known: dict(DEFAULT_LLAMA) if known.get("family") == "llama" else {},
        description="Keyword arguments of the transformers configuration. Default: for llama the demo's small model ("
        + ", ".join(f"{key} {value}" for key, value in DEFAULT_LLAMA.items())
        + "), otherwise the configuration's own defaults, or those of `pretrained`.",
    )
    module: str = Field(
        default="",
        max_length=256,
        description='With family "module": "package.module:function", a function that returns a torch.nn.Sequential. '
        "Every node must be able to import it.",
    )
    weights: Literal["bf16", "int8", "nf4"] = Field(
        default="bf16",
        description='How nodes keep the frozen weights of a run with `[adapter]`. "bf16": as published, in the precision that '
        'the run computes in. "int8" and "nf4": the matrices of the decoder layers in 8 or 4 bits, by bitsandbytes. They '
        "need a half or a quarter of the memory of 16 bits.",
    )

    @field_validator("pretrained")
    @classmethod
    def _pretrained_usable(cls, pretrained: str) -> str:
        return _usable(pretrained)

    @field_validator("family")
    @classmethod
    def _family_fits(cls, family: str, info: ValidationInfo) -> str:
        pretrained = info.data.get("pretrained", "")
        if not family and not pretrained:
            raise ValueError('must be a model_type of transformers, like "llama", or "module"')
        if family == "module" and pretrained:
            raise ValueError(
                "cannot begin with model.pretrained, which is for models of transformers; remove one of them"
            )
        return family

    @field_validator("config")
    @classmethod
    def _config_fits(cls, config: dict[str, Any]) -> dict[str, Any]:
        try:
            text = json.dumps(config, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"must hold only numbers, strings, booleans, lists and tables ({error})") from None
        if len(text) > 65536:
            raise ValueError(f"must be at most 65536 characters as JSON, not {len(text)}")
        return config

    @field_validator("module")
    @classmethod
    def _module_fits(cls, module: str, info: ValidationInfo) -> str:
        if info.data.get("family") != "module":
            if module:
                raise ValueError('needs family = "module"; set that, or remove module')
        elif not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", module):
            raise ValueError('with family = "module", must name a function like "package.module:function"')
        return module


MOST_NAMES = 100
"""Names of modules in adapter.targets, and in adapter.train_also."""


class Adapter(Table):
    """Fine-tuning by LoRA. With this table the weights of `model.pretrained` stay as they are, and the run trains small matrices
    beside them. Nodes reduce, keep and send these alone."""

    pretrained: str = Field(
        default="",
        max_length=4096,
        description="The adapter to begin with, as peft's save_pretrained writes it (adapter_config.json and "
        "adapter_model.safetensors): a folder, a URL, or a name on the Hugging Face hub. If it is a folder on the coordinator's "
        "disk, nodes read it from the coordinator, and keys that are left out follow from it. Such a folder, or a run in "
        "dtfm-runs, may also be named as `model.pretrained`: then the model follows from it too. Without this key a new adapter "
        "begins.",
    )
    rank: int = Field(default=16, ge=1, le=4096, description="The rank of the two matrices beside each trained one.")
    alpha: float = Field(
        default_factory=lambda known: 2.0 * known.get("rank", 0),
        gt=0,
        le=1e6,
        description="The product of the two matrices counts times `alpha / rank`. Default: twice `rank`.",
    )
    rs: bool = Field(
        default=False,
        description="The product counts times `alpha` over the square root of `rank` (rsLoRA), which suits high ranks.",
    )
    dora: bool = Field(
        default=False,
        description="The length of each row of an adapted matrix is trained too, apart from its direction (DoRA, arXiv "
        "2402.09353). Each micro-batch computes the present lengths again: that takes time, and the memory of some copies of the "
        'largest matrix. Not with `model.weights` "int8".',
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="The share of each adapted matrix's input that its adapter does not get in a step, like 0.05. Which numbers "
        "these are follows from `seed`, the micro-batch and the matrix: all nodes drop the same.",
    )
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description='The modules that get an adapter, like ["q_proj", "v_proj"], by the ends of their names. "all-linear": all '
        "matrices of the decoder layers.",
    )

    @field_validator("pretrained")
    @classmethod
    def _pretrained_usable(cls, pretrained: str) -> str:
        return _usable(pretrained)

    train_also: list[str] = Field(
        default=[],
        description='Modules that are trained whole beside the adapter, like ["embed_tokens", "lm_head"], by the ends of their '
        'names, as in peft\'s `modules_to_save`: "norm" also means each "input_layernorm", and "model.norm" the last norm '
        "alone. Their weights are kept in `train.precision`, whatever `model.weights` says, with gradients and moments. If a "
        "model's head is its embedding, both are one matrix here too.",
    )

    @field_validator("targets", mode="plain")
    @classmethod
    def _targets_fit(cls, targets: object) -> object:
        if targets == "all-linear" or (targets and _are_names(targets)):
            return targets
        raise ValueError('must be "all-linear", or names of modules, like ["q_proj", "v_proj"]')

    @field_validator("train_also", mode="plain")
    @classmethod
    def _train_also_fits(cls, names: object) -> object:
        if _are_names(names):
            return names
        raise ValueError('must be names of modules, like ["embed_tokens", "lm_head"]')


def _are_names(given: object) -> bool:
    """Whether these are names of modules, and not too many."""
    if not isinstance(given, list) or len(given) > MOST_NAMES:
        return False
    return all(isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.]{1,200}", name) for name in given)
