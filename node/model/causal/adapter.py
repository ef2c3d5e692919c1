"""LoRA beside the matrices of a causal language model, as peft makes it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dtfm.node.data.problems import in_one_line
from dtfm.node.model.causal.adapter_files import LORA
from dtfm.node.model.causal.trained_modules import check_named, train_whole
from dtfm.node.model.dropout import Dropout
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.published_files import LENGTHS

_NAME = "default"
"""peft's name of the adapter."""
_BASE = "base_layer"
"""peft's name of the module beside which an adapter stands."""


def adapter_config(adapter: Run.Adapter, base: str, revision: str | None) -> LoraConfig:
    """peft's description of the adapter for the model ``base``, as adapter_config.json has it."""
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    return LoraConfig(
        r=adapter.rank,
        use_rslora=adapter.rs,
        use_dora=adapter.dora,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft divides it, whatever number it is
        target_modules=list(adapter.targets) or "all-linear",
        lora_dropout=adapter.dropout,
        bias="none",
        task_type="CAUSAL_LM",
        modules_to_save=list(adapter.train_also) or None,
        base_model_name_or_path=base,
        revision=revision,
    )


def with_adapter(module: PreTrainedModel, decoder: str, config: LoraConfig) -> PreTrainedModel:
    """A copy of ``module``, whose parameters are on meta, that trains an adapter alone, and the modules that the ``config``
    saves. ``decoder``: the name of its decoder layers. Completes the ``config``. Raises ValueError if a target is no matrix
    there, or smaller than the adapter's rank, or if a module to save is not there."""
    whole = copy.deepcopy(module)
    check_named(whole, config.modules_to_save or ())
    there = {
        name.rpartition(".")[2]
        for name, part in whole.named_modules()
        if isinstance(part, (nn.Linear, Conv1D)) and name.startswith(f"{decoder}.")
    }
    names = ", ".join(sorted(there))
    if not there:
        raise ValueError("adapter.targets: the decoder layers of this model have no matrices that peft knows")
    wanted = config.target_modules
    if not isinstance(wanted, str):
        missing = [name for name in wanted or () if name.rpartition(".")[2] not in there]
        if missing:
            raise ValueError(
                f"adapter.targets: the decoder layers have no matrix {sorted(missing)[0]!r}; they have {names}"
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Conv1D is transposed, which peft then sets itself
            inject_adapter_in_model(config, whole, low_cpu_mem_usage=True)
    except ValueError as problem:
        raise ValueError(f"adapter.targets: {in_one_line(problem)}; the decoder layers have {names}") from None
    except TypeError as problem:
        raise ValueError(
            f"adapter.train_also: {', '.join(config.modules_to_save or ())} also ends the name of a list, or of a matrix with an "
            f"adapter ({in_one_line(problem)}); write a module's whole name"
        ) from None
    for name, part in whole.named_modules():
        if isinstance(part, LoraLayer):
            if not name.startswith(f"{decoder}."):
                raise ValueError(f"adapter.targets: {name!r} is outside the decoder layers; they have {names}")
            rows, columns = part.out_features, part.in_features
            assert rows is not None
            assert columns is not None
            if config.lora_dropout:
                part.lora_dropout[_NAME] = Dropout(config.lora_dropout, name)  # peft's would differ from node to node
            smallest = min(rows, columns)
            if config.r > smallest:
                raise ValueError(
                    f"adapter.rank = {config.r}: {name} is a matrix of {rows} times {columns}; the rank "
                    f"must be at most {smallest}"
                )
    train_whole(whole, config)
    return whole


def name_in_base(name: str) -> str:
    """The name that a frozen parameter has in the model without the adapter."""
    return name.replace(f".{_BASE}.", ".")


def adapted_layers(module: nn.Module, parameters: Iterable[str]) -> dict[str, nn.Module]:
    """By name, the modules of peft that have these trained parameters, without the modules beside which they stand."""
    names = dict.fromkeys(name.partition(LORA)[0] for name in parameters)
    found = {name: module.get_submodule(name) for name in names}
    return {name: copy.deepcopy(part, {id(part.get_submodule(_BASE)): nn.Identity()}) for name, part in found.items()}


def initialise_adapter(module: nn.Module) -> None:
    """Sets the adapter of one module as peft does: the first matrix is random, the second zero. Lengths of rows, which follow
    from the module's own matrix, are one (see `lengths_of_rows`)."""
    if isinstance(module, LoraLayer):
        module.reset_lora_parameters(_NAME, True)  # type: ignore[no-untyped-call]
        for lengths in module.lora_magnitude_vector.parameters():
            nn.init.ones_(lengths)


def beside_lengths(module: nn.Module, name: str) -> tuple[str, bool]:
    """Of the parameter with the lengths of rows (DoRA) that has this ``name``: the name of the matrix, and whether the matrix is
    stored as [columns, rows]."""
    path = name.partition(LENGTHS)[0]
    return f"{path}.{_BASE}.weight", bool(getattr(module.get_submodule(path), "fan_in_fan_out", False))


def lengths_of_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The length of each row, float32, the same bits on every CPU: torch's own sums differ between kinds of CPUs."""
    squares = matrix.double().square()
    while (columns := squares.shape[1]) > 1:
        half = columns // 2
        sums = squares[:, :half] + squares[:, half : 2 * half]
        squares = torch.cat([sums, squares[:, 2 * half :]], 1) if columns % 2 else sums
    return squares[:, 0].sqrt().float()


def save_adapter_config(config: LoraConfig, folder: Path) -> None:
    """Writes adapter_config.json into a local folder, as peft writes it beside trained weights."""
    saved = copy.copy(config)
    saved.inference_mode = True
    saved.save_pretrained(str(folder))
