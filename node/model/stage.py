"""A stage: consecutive layers with their weights, gradients and optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from blake3 import blake3
from torch import nn

from dtfm.node.model.bucket import Bucket
from dtfm.node.model.loss import Scored, score, score_in_chunks
from dtfm.node.model.model import Model, canonical_names


class Stage:
    """Layers [first, past_last) of a model, made by `build_stage`.

    ``buckets`` are those that its layers use, by index in ascending order; a bucket shared with another stage is in both.
    ``parameters`` are the module's parameters by bucket: views into the bucket's flat tensors.
    """

    def __init__(self, model: Model, first: int, past_last: int, buckets: Mapping[int, Bucket], autocast: bool) -> None:
        some = next(iter(buckets.values())).parameters
        self.model, self.first, self.past_last = model, first, past_last
        self.device, self.dtype, self.buckets = some.device, some.dtype, dict(buckets)
        self._autocast = autocast
        module = copy.deepcopy(model.module)
        self.parameters = _fill(module, self.buckets, self.device, self.dtype)
        self._part = model.cut(module, first, past_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One micro-batch through the stage.

        ``x`` is the model's input (token ids: int64 [b, s]) for the first stage, else the hidden states of the layer before
        ([b, ...], the stage's dtype). Returns logits from the last stage, else hidden states (see `Model.activation_shape`),
        always in the stage's dtype. Not thread-safe.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            y = self._body(x)
            if self._part.head is not None:
                logits = self._part.head(y.flatten(0, -2))
                y = logits.view(*y.shape[:-1], logits.shape[-1])
            return y.to(self.dtype)

    def loss(self, x: torch.Tensor, labels: torch.Tensor, weight: float = 1.0) -> Scored:
        """The loss of one micro-batch on the last stage; ``x`` as for `forward`, ``labels`` as for `score`. Unless gradients are
        off, the backward pass must follow, once: see `score_in_chunks`. Not thread-safe."""
        head, classes = self._part.head, self.model.layers[-1].output[-1]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            y = self._body(x)
            if head is None:
                return score(y, labels, weight)
            parameters = [
                p for i, b in self.buckets.items() if self.past_last - 1 in b.spec.layers for p in self.parameters[i]
            ]
            return score_in_chunks(head, y, labels, classes, parameters, weight)

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        return self._part.body(x.to(self.dtype) if x.is_floating_point() else x)

    def initialise(self, seed: int) -> None:
        """Sets all buckets to their initial values; see `initialise`."""
        for bucket in self.buckets.values():
            initialise(self.model, bucket, seed)

    def zero_gradients(self) -> None:
        for bucket in self.buckets.values():
            bucket.gradients.zero_()

    def digest(self) -> bytes:
        """BLAKE3 (32 bytes) of parameters and optimizer state of all buckets in ascending order."""
        digest = blake3()
        for bucket in self.buckets.values():
            for part in bucket.export():
                digest.update(part)
        return digest.digest()


def build_stage(
    model: Model,
    first: int,
    past_last: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    autocast: bool = False,
    held: Mapping[int, Bucket] | None = None,
) -> Stage:
    """A stage of layers [first, past_last). New buckets are zero: initialise or load them.

    ``autocast`` computes matrix products in bfloat16. Buckets in ``held`` (by index) are used as they are, without a copy.
    """
    assert 0 <= first < past_last <= len(model.layers), (first, past_last)
    specs = [spec for spec in model.buckets if spec.used_by(first, past_last)]
    held = held or {}
    buckets = {spec.index: held.get(spec.index) or Bucket(spec, device, dtype) for spec in specs}
    return Stage(model, first, past_last, buckets, autocast)


def initialise(model: Model, bucket: Bucket, seed: int) -> None:
    """Sets the parameters to their initial values, a function of (seed, bucket) alone, and moments and gradients to zero."""
    values = model.initial_parameters(bucket.spec, seed)
    for name, view in bucket.views(bucket.parameters).items():
        view.copy_(values[name])
    for tensor in (bucket.gradients, bucket.exp_avg, bucket.exp_avg_sq):
        tensor.zero_()


def _fill(
    module: nn.Module, buckets: Mapping[int, Bucket], device: torch.device, dtype: torch.dtype
) -> dict[int, tuple[nn.Parameter, ...]]:
    """Replaces meta parameters by views into the buckets, under every name, and moves buffers to the device."""
    real: dict[str, nn.Parameter] = {}
    for bucket in buckets.values():
        gradients = bucket.views(bucket.gradients)
        for name, view in bucket.views(bucket.parameters).items():
            real[name] = nn.Parameter(view)
            real[name].grad = gradients[name]
    canonical = canonical_names(module)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and canonical[id(parameter)] in real:
                part._parameters[name] = real[canonical[id(parameter)]]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)
    return {index: tuple(real[name] for name, _ in bucket.spec.parameters) for index, bucket in buckets.items()}
