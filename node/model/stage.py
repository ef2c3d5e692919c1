"""A stage: consecutive layers with their weights, gradients and optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from dtfm.node.model.bucket import HOST, STATE_TENSORS, Bucket
from dtfm.node.model.frozen import FrozenWeights
from dtfm.node.model.loss import Scored, loss_of_part
from dtfm.node.model.model import Forward, Model, canonical_names
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState

ADDED_AT_ONCE = 1 << 18
"""Elements of a gradient that a CPU adds up at a time."""


class Stage:
    """Layers [first, past_last) of a model, made by `build_stage`.

    ``buckets`` are the buckets that its layers use, by index in ascending order. A bucket shared with another stage is in both.
    ``weights``, by bucket, are flat tensors of ``dtype`` on ``device``, for computing. They are the bucket's own parameters, or
    a copy if these have another dtype or are in the host's memory. ``parameters`` are the module's trained parameters by bucket:
    views into ``weights``. The others come from ``frozen``.
    """

    def __init__(
        self,
        model: Model,
        first: int,
        past_last: int,
        buckets: Mapping[int, Bucket],
        device: torch.device,
        dtype: torch.dtype,
        keeping: Keeping,
        frozen: FrozenWeights,
    ) -> None:
        self.model, self.first, self.past_last = model, first, past_last
        self.device, self.dtype, self.keeping, self.buckets = device, dtype, keeping, dict(buckets)
        shares = keeping.optimizer_state is OptimizerState.DEVICE
        self.weights = {
            index: bucket.parameters
            if shares and bucket.parameters.dtype == dtype
            else torch.zeros(bucket.spec.size, dtype=dtype, device=device)
            for index, bucket in self.buckets.items()
        }
        module = copy.deepcopy(model.module)
        self.parameters = self._fill(module, frozen.into(module, first, past_last, device, dtype))
        self._part = model.cut(module, first, past_last, keeping.checkpointing is Checkpointing.LAYER)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """One micro-batch through the stage.

        ``x`` is the model's input (token ids: int64 [b, s]) for the first stage, otherwise the hidden states of the layer
        before ([b, ...], the stage's dtype). ``positions`` are Data.positions of the micro-batch. Returns logits from the last
        stage, otherwise hidden states (see `Model.activation_shape`), always in the stage's dtype. Not thread-safe.
        """
        y = self._body(positions)(self._given(x))
        if self._part.head is not None:
            logits = self._part.head(y.flatten(0, -2))
            y = logits.view(*y.shape[:-1], logits.shape[-1])
        return y.to(self.dtype)

    def loss(
        self,
        x: torch.Tensor,
        labels: torch.Tensor,
        weight: float = 1.0,
        positions: torch.Tensor | None = None,
        only: Sequence[nn.Parameter] | None = None,
        per_label: float | None = None,
    ) -> Scored:
        """The loss of one micro-batch on the last stage. ``x`` and ``positions`` as for `forward`, ``labels`` and
        ``per_label`` as for `loss_of_part`.

        Unless gradients are off, the backward pass must follow, once: see there. With ``only``, the backward pass is
        torch.autograd.grad for the input and some of these parameters, and nothing is added to any `.grad`. Not thread-safe.
        """
        last = self.past_last - 1
        read = [p for i, bucket in self.buckets.items() if last in bucket.spec.layers for p in self.parameters[i]]
        if only is not None:
            read = [parameter for parameter in read if any(parameter is wanted for wanted in only)]
        part, classes = replace(self._part, body=self._body(positions)), self.model.layers[last].output[-1]
        return loss_of_part(part, self._given(x), labels, classes, read, weight, only is not None, per_label)

    def _body(self, positions: torch.Tensor | None) -> Forward:
        return self._part.body if positions is None else partial(self._part.body, positions=positions)

    def _given(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x

    def release(self) -> None:
        """Frees the stage's weights and its hold on the buckets, even if others still refer to the stage. It cannot compute
        after that."""
        self.weights, self.parameters = {}, {}
        self.buckets = {}  # another dict: the store may hold the one before
        self.__dict__.pop("_part", None)

    @torch.no_grad()
    def refresh(self, index: int) -> None:
        """Computes with the bucket's new parameters from now on. Call it when they have changed."""
        if self.weights[index] is not self.buckets[index].parameters:
            self.weights[index].copy_(self.buckets[index].parameters)

    def zero_gradients(self) -> None:
        for bucket in self.buckets.values():
            bucket.gradients.zero_()

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of state, gradients, updates and weights: on the device, and in the host's memory."""
        device, host = self.model.frozen.stage_bytes(self.first, self.past_last, self.dtype), 0
        for index, bucket in self.buckets.items():
            state = sum(bucket.spec.sizes[:STATE_TENSORS]) * bucket.parameters.itemsize
            host += bucket.for_exchanges_bytes
            own = self.weights[index] is not bucket.parameters
            device += bucket.gradients.nbytes + bucket.updates.nbytes + (self.weights[index].nbytes if own else 0)
            if self.keeping.optimizer_state is OptimizerState.HOST:
                host += state
            else:
                device += state
        return device, host

    def _fill(self, module: nn.Module, frozen: Mapping[str, nn.Parameter]) -> dict[int, tuple[nn.Parameter, ...]]:
        """Replaces meta parameters by views into the weights, or by ``frozen`` ones, under every name. Moves buffers to the
        device.

        If weights and bucket have one dtype, autograd adds each gradient to the bucket's, in place. Otherwise each backward
        pass makes a gradient of its own, and a hook adds it to the bucket's and frees it.
        """
        real = dict(frozen)
        for index, bucket in self.buckets.items():
            gradients = bucket.views(bucket.gradients)
            for name, view in bucket.views(self.weights[index]).items():
                real[name] = parameter = nn.Parameter(view)
                if parameter.dtype == bucket.gradients.dtype:
                    parameter.grad = gradients[name]
                else:
                    parameter.register_post_accumulate_grad_hook(partial(_add, gradients[name]))  # type: ignore[no-untyped-call]
        install(self.model, module, real, self.device, self.dtype)
        return {index: tuple(real[name] for name, _ in b.spec.parameters) for index, b in self.buckets.items()}


def install(
    model: Model, module: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device, dtype: torch.dtype
) -> None:
    """Gives ``module``, a copy of the model's, these parameters by name, tied ones under every name. Moves its buffers to
    ``device``, as a module that computes in ``dtype`` has them."""
    canonical, of_buffers = canonical_names(module), model.buffer_dtype(dtype)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and canonical[id(parameter)] in parameters:
                part._parameters[name] = parameters[canonical[id(parameter)]]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device, of_buffers if buffer.is_floating_point() else None)


def home_of(keeping: Keeping, device: torch.device) -> torch.device:
    """The memory for a stage's state."""
    return HOST if keeping.optimizer_state is OptimizerState.HOST else device


def build_stage(
    model: Model,
    first: int,
    past_last: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    computes_in: torch.dtype | None = None,
    keeping: Keeping = Keeping(),  # noqa: B008  # a frozen value
    held: Mapping[int, Bucket] | None = None,
    frozen: FrozenWeights | None = None,
) -> Stage:
    """A stage of layers [first, past_last) whose state has ``dtype``. New buckets are zero: initialise or load them.

    It computes in ``computes_in``, by default ``dtype``. Buckets in ``held`` (by index) are used without a copy, unless
    ``keeping`` wants their state elsewhere. When the buckets have their values, call `Stage.refresh` for them. Weights that are
    not trained come from ``frozen``, by default the model's: those that are missing there are read. Raises ValueError if they
    cannot be.
    """
    assert 0 <= first < past_last <= len(model.layers), (first, past_last)
    specs = [spec for spec in model.buckets if spec.used_by(first, past_last)]
    home = home_of(keeping, device)
    buckets: dict[int, Bucket] = {}
    for spec in specs:
        mine = (held or {}).get(spec.index)
        buckets[spec.index] = mine.placed(device, home) if mine is not None else Bucket(spec, device, dtype, home)
    given = model.frozen if frozen is None else frozen
    return Stage(model, first, past_last, buckets, device, computes_in or dtype, keeping, given)


def initialise(model: Model, bucket: Bucket, seed: int) -> None:
    """Sets the parameters to their initial values, a function of (seed, bucket) alone, and moments and gradients to zero."""
    values = model.initial_parameters(bucket.spec, seed)
    for name, view in bucket.views(bucket.parameters).items():
        view.copy_(values[name])
    for tensor in (bucket.gradients, *bucket.state[1:]):
        tensor.zero_()


def _add(total: torch.Tensor, parameter: torch.Tensor) -> None:
    """A hook for when the gradient of a micro-batch is whole. A CPU adds some rows at a time: it makes a copy of these rows in
    the sum's dtype."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    rows = (
        max(1, ADDED_AT_ONCE * len(gradient) // max(1, gradient.numel())) if gradient.ndim and not total.is_cuda else 0
    )
    if rows:
        for part, added in zip(torch.split(total, rows), torch.split(gradient, rows), strict=True):
            part.add_(added)
    else:
        total.add_(gradient)
