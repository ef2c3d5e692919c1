"""A published model with an adapter that is trained. Its own weights do not change, except those of modules that are trained
also."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from dtfm.node.data.samples import Sample
from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.causal.adapter import (
    adapted_layers,
    adapter_config,
    beside_lengths,
    initialise_adapter,
    lengths_of_rows,
    name_in_base,
    save_adapter_config,
    with_adapter,
)
from dtfm.node.model.causal.adapter_files import LORA, AdapterFiles
from dtfm.node.model.causal.anatomy import Anatomy, dissect
from dtfm.node.model.causal.language_model import CausalLM
from dtfm.node.model.causal.pretrained import Pretrained
from dtfm.node.model.causal.quantised import Quantised
from dtfm.node.model.causal.trained_modules import shared_names
from dtfm.node.model.causal.weight_files import WeightFiles
from dtfm.node.model.frozen import FrozenWeights, Packing
from dtfm.node.model.model import canonical_names
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.published_files import LENGTHS


class AdaptedLM(CausalLM):
    """``module`` is the model without the adapter, with this ``anatomy``. ``weights``: how the frozen ones are kept."""

    def __init__(
        self,
        module: PreTrainedModel,
        sample: Sample,
        anatomy: Anatomy,
        files: WeightFiles,
        adapter: Run.Adapter,
        weights: str,
    ) -> None:
        """Raises ValueError if the adapter does not fit the model, or the weights are kept in a way that this node cannot."""
        pretrained = Pretrained(files, module)
        self._config = adapter_config(adapter, *files.published)
        adapted = with_adapter(module, anatomy.decoder, self._config)
        anatomy = replace(dissect(adapted, sample), separate_head=anatomy.separate_head)
        super().__init__(adapted, sample, anatomy, None)
        self._files, self._base = files, pretrained
        shared = shared_names(adapted)
        self.buckets = tuple(
            replace(spec, further_names=shared[spec.parameters[0][0]][1:])
            if len(spec.layers) > 1 and spec.parameters[0][0] in shared
            else spec
            for spec in self.buckets
        )
        self._begun_from = AdapterFiles(adapter.pretrained) if adapter.pretrained else None
        if self._begun_from is not None:
            trained = {
                name: torch.Size(shape)
                for spec in self.buckets
                for first, shape in spec.parameters
                for name in (first, *spec.further_names)
            }
            further = [name for spec in self.buckets for name in spec.further_names]
            self._begun_from.check(adapter, trained, files.name, further)
        parameters, canonical = dict(adapted.named_parameters(remove_duplicate=False)), canonical_names(adapted)
        of_layers = [
            [canonical[id(parameters[name])] for name in layer.parameters if not parameters[name].requires_grad]
            for layer in anatomy.layers
        ]

        def read(name: str) -> torch.Tensor:
            own = name_in_base(name)
            return pretrained.read([own])[own]

        shapes = {name: parameters[name].shape for names in of_layers for name in names}
        packing = Packing() if weights == "bf16" else Quantised(weights, adapted, anatomy.decoder)
        self._read_frozen, self._packing = read, packing
        self.frozen = FrozenWeights(of_layers, shapes, read, packing)

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """None: they are the published model's."""
        return {}

    def weights_fingerprint(self, seed: int) -> bytes:
        """The model's, and that of the adapter to begin with."""
        begun_from = self._begun_from
        own = b"" if begun_from is None else begun_from.digest + begun_from.digest_of_values(seed)
        return super().weights_fingerprint(seed) + own

    def keep_frozen_in(self, folder: Path, seed: int, authority: bytes) -> None:
        """A folder on this machine is as near. But packing its weights again takes longer than reading them packed."""
        assert self._files is not None
        if self.frozen.packing or not self._files.is_on_this_disk:
            self.frozen.keep_in(folder, self._files.source(seed, authority))

    def initial_parameters(self, bucket: BucketSpec, seed: int) -> dict[str, torch.Tensor]:
        if self._begun_from is not None:
            return self._begun_from.read_trained([name for name, _ in bucket.parameters], bucket.further_names)
        values = super().initial_parameters(
            replace(bucket, parameters=tuple(each for each in bucket.parameters if LORA in each[0])), seed
        )
        values |= self._base.read(name for name, _ in bucket.parameters if name not in values)
        values |= {name: self._lengths(name) for name in values if LENGTHS in name}
        return {name: values[name] for name, _ in bucket.parameters}

    def _lengths(self, name: str) -> torch.Tensor:
        """The first values of this parameter: the lengths of the rows of its matrix, as nodes keep that."""
        matrix, is_transposed = beside_lengths(self.module, name)
        numbers = self._read_frozen(matrix)
        if isinstance(self._packing, Quantised):
            numbers = self._packing.unpacked(self._packing.packed(matrix, numbers, torch.float32))
        return lengths_of_rows(numbers.T if is_transposed else numbers)

    def initialised_parts(self, bucket: BucketSpec) -> Mapping[str, nn.Module]:
        return adapted_layers(self.module, (name for name, _ in bucket.parameters))

    def initialise_module(self, module: nn.Module) -> None:
        initialise_adapter(module)

    def save_config(self, folder: Path, dtype: torch.dtype, special_ids: Mapping[str, int]) -> None:
        save_adapter_config(self._config, folder)
