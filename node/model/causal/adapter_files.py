"""The adapter that a run begins with, in a folder of peft."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from dtfm.node.model.causal.weight_files import WeightFiles, repository_of
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.published_files import ADAPTER, ADAPTER_CONFIG, in_peft
from dtfm.protos.run_file.published_adapter import check_base, check_same, published_adapter

log = logging.getLogger(__name__)

_MERGE = "merge it with its model (peft's merge_and_unload), and begin with that"
LORA = ".lora_"
"""In the names of LoRA's tensors. Others belong to modules that are trained whole."""


class AdapterFiles(WeightFiles):
    """The adapter's settings and tensors."""

    KEY = "adapter.pretrained"
    SETTINGS = ADAPTER_CONFIG
    WHOLE = f"{ADAPTER}.safetensors"

    def check(
        self, adapter: Run.Adapter, trained: Mapping[str, torch.Size], base: str, further: Collection[str] = ()
    ) -> None:
        """Raises ValueError unless this is an adapter for the model ``base``, as the run file describes it. ``trained``: by name,
        the shapes of the run's trained parameters. ``further``: of these names, those of parameters that have another one too."""
        try:
            found = published_adapter(self.config, self.name)
        except ValueError as problem:
            raise ValueError(f"{self.KEY}: {problem}") from None
        check_base(found, base, self.name)
        if found.base and (theirs := repository_of(found.base)) != (mine := repository_of(base)):
            log.info("the adapter of %s was trained beside %s, and goes on beside %s", self.name, theirs, mine)
        check_same(found, adapter, self.name)
        wanted = {in_peft(name): shape for name, shape in trained.items()}
        missing, unknown = sorted(wanted.keys() - self.tensors.keys()), sorted(self.tensors.keys() - wanted.keys())
        if not unknown and set(missing) <= set(map(in_peft, further)):
            for name in missing:
                raise self._wrong(f"it has no {name}: it trains one of two matrices that are one in this model", _MERGE)
        if missing or unknown:
            what = (
                f"{unknown[0]}, which the run does not train" if unknown else f"no {missing[0]}, which the run trains"
            )
            key, value = "targets", list(found.targets) if isinstance(found.targets, tuple) else found.targets
            if LORA not in (unknown or missing)[0]:
                key, value = "train_also", list(found.train_also)
            raise self._wrong(
                f"it has {what}",
                f"set adapter.{key} = {value!r:.300} if it stands beside this model, or name an adapter that does",
            )
        for name, shape in wanted.items():
            if self.tensors[name].shape != tuple(shape):
                raise self._wrong(
                    f"{name} has shape {list(self.tensors[name].shape)}, and beside this model it would have {list(shape)}",
                    "it is an adapter for another model; name one for this model",
                )

    def read_trained(self, names: Sequence[str], further: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """The values of trained parameters, float32 or float64 on the CPU. ``further``: other names of the only one. Raises
        ValueError if a file cannot be read, or has other values under those."""
        found = {name: self.read(in_peft(name)) for name in names}
        for name in further:
            if not torch.equal(found[names[0]], self.read(in_peft(name))):
                raise self._wrong(
                    f"{names[0]} and {name} differ, and in this model they are one parameter",
                    _MERGE,
                )
        return {name: value if value.dtype == torch.float64 else value.float() for name, value in found.items()}
