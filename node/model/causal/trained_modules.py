"""Modules that are trained whole beside an adapter: peft's `modules_to_save`."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

log = logging.getLogger(__name__)


def check_named(model: nn.Module, names: Iterable[str]) -> None:
    """Raises ValueError if a name ends the name of no module with weights. Modules are found as peft finds them."""
    there = [name for name, part in model.named_modules() if name and next(part.parameters(), None) is not None]
    for wanted in names:
        if not any(name.endswith(wanted) for name in there):
            known = sorted({end for name in there if not (end := name.rpartition(".")[2]).isdigit()})
            raise ValueError(
                f"adapter.train_also: no module with weights is called {wanted!r}; there are {', '.join(known)}"
            )


def train_whole(model: nn.Module, config: LoraConfig) -> None:
    """Has ``model``, into which peft has put an adapter, train the modules that the ``config`` saves. peft has made a copy of
    each to train; here the module itself is trained. Adds to the config the modules that share a trained parameter. Raises
    ValueError if a module has an adapter too."""
    wrapped = {name: part for name, part in model.named_modules() if isinstance(part, ModulesToSaveWrapper)}
    for name, wrapper in wrapped.items():
        module, (around, _, own) = wrapper.original_module, name.rpartition(".")
        for part in module.modules():
            if isinstance(part, LoraLayer):
                raise ValueError(
                    f"adapter.train_also: {name} has an adapter, so that it is not trained whole; write its whole name, or "
                    "leave it out"
                )
        setattr(model.get_submodule(around), own, module.requires_grad_(True))
    for names in shared_names(model).values():
        modules = [name.rpartition(".")[0] for name in names]
        log.info("%s are one matrix in this model, and are trained as one", " and ".join(modules))
        # Otherwise peft would train one, and leave the others as they were.
        config.ensure_weight_tying = True
        config.modules_to_save = [*(config.modules_to_save or ()), *(each for each in modules if each not in wrapped)]


def shared_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """By the first name of each trained parameter that has several, all of its names."""
    found = dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found.setdefault(id(parameter), []).append(name)
    return {names[0]: tuple(names) for names in found.values() if len(names) > 1}
