"""The loss of a micro-batch, without holding all its logits in memory at the same time.

The logits of a micro-batch are by far its largest tensor: 2048 tokens and a vocabulary of 128,000 make 1 GiB in float32. The
loss needs several tensors of that size. So the logits are made a chunk of tokens at a time, and each chunk's gradient right
after, as in Liger Kernel (arXiv 2410.10989, section 3.2).

torch's own linear_cross_entropy does this for a head that is one matrix product. Here the head is any function of the hidden
states of one token, since families scale or cap their logits. This code also adds each chunk's gradients to the parameters',
whereas torch's keeps a second gradient of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from dtfm.node.data.samples import NOT_LEARNT
from dtfm.node.model.model import Forward, Part

MOST_LOGITS_BYTES = 64 << 20
"""Most bytes of a chunk's logits in float32, unless it has fewer than LEAST_TOKENS tokens."""

LEAST_TOKENS = 256
"""With fewer tokens in a chunk, reading the head's weights takes longer than the matrix product."""


@dataclass(frozen=True, slots=True)
class Scored:
    """``mean`` is a micro-batch's loss in nats: the sum over its learnt labels, each with its weight (see label_weights). It is a
    scalar, detached, float32 (float64 for float64 logits).

    ``weighted`` is ``mean`` times its weight in the loss that is trained, with its graph: the backward pass starts there, with
    gradient 1.
    """

    mean: torch.Tensor
    weighted: torch.Tensor


def label_weights(labels: torch.Tensor, dtype: torch.dtype, per_label: float | None = None) -> torch.Tensor:
    """The weight of each label in a micro-batch's loss, of the shape of ``labels`` ([b, ...]). A label that is not learnt has
    weight 0.

    With ``per_label``, each learnt label has this weight. Otherwise the loss of a sample is the mean over its learnt labels, and
    the loss of a micro-batch, or of a step, is the mean over its samples. So the weights of a sample's learnt labels are equal,
    and sum to 1 / b. The weights depend on each sample alone, wherever the others are computed.
    """
    learnt = (labels != NOT_LEARNT).to(dtype)
    if per_label is not None:
        return learnt * per_label
    each = learnt.flatten(1).sum(1) if labels.ndim > 1 else learnt
    share = 1 / (len(labels) * each.clamp(min=1))
    return learnt * share.view(-1, *[1] * (labels.ndim - 1))


def loss_of_part(
    part: Part,
    x: torch.Tensor,
    labels: torch.Tensor,
    classes: int,
    parameters: Sequence[torch.nn.Parameter],
    weight: float = 1.0,
    apart: bool = False,
    per_label: float | None = None,
) -> Scored:
    """The loss of the last stage's ``part`` for its input ``x`` and ``labels`` int64 [b, ...]: [b, s] for language models, and
    [b] for classifiers.

    ``per_label``: see label_weights. ``parameters`` include all parameters that the part's head reads. ``classes`` is the width
    of its logits. If there are several chunks, and gradients are wanted, the gradients of all chunks but the last are added to
    the parameters' ``.grad`` here: call the backward pass exactly once. With ``apart``, nothing is added to any ``.grad``: the
    backward pass is torch.autograd.grad, for the input and ``parameters``.
    """
    head, hidden = part.head or _logits_themselves, part.body(x)
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    counts = label_weights(labels, _wide_dtype(hidden), per_label).flatten()
    size = chunk_tokens(len(flat), classes)
    if size == len(flat):
        whole = _mean(head(flat), targets, counts)
        return Scored(whole.detach(), whole * weight)
    settings = (head, size, weight, torch.is_grad_enabled(), apart)
    mean, weighted = _InChunks.apply(flat, targets, counts, *settings, *parameters)  # type: ignore[no-untyped-call]
    return Scored(mean, weighted)


def _logits_themselves(logits: torch.Tensor) -> torch.Tensor:
    return logits


def chunk_tokens(tokens: int, classes: int) -> int:
    """Tokens in a chunk: all, or as many as make nearly equal chunks within the bounds."""
    most = max(LEAST_TOKENS, MOST_LOGITS_BYTES // (4 * classes))
    return -(-tokens // -(-tokens // most)) if tokens else 0


class _InChunks(torch.autograd.Function):
    """Returns (mean, mean times weight). Only the second has a gradient, which must be 1."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor,
        head: Forward,
        size: int,
        weight: float,
        wanted: bool,
        apart: bool,
        *parameters: torch.nn.Parameter,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(hidden) if wanted else None
        total: torch.Tensor | None = None
        found: Sequence[torch.Tensor | None] = ()  # of the parameters
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            with torch.set_grad_enabled(wanted):
                given = hidden[chunk].detach().requires_grad_(wanted)
                loss = _mean(head(given), labels[chunk], counts[chunk])
                weighted = loss * weight
            total = loss.detach() if total is None else total + loss.detach()
            if gradient is None:
                continue
            if start + size < len(hidden) and not apart:
                torch.autograd.backward(weighted)
                assert given.grad is not None
                gradient[chunk] = given.grad
            else:
                # These reach the parameters in the backward pass, so that hooks see when the gradients are final.
                gradient[chunk], *more = torch.autograd.grad(weighted, [given, *parameters], allow_unused=True)
                found = [_sum(a, b) for a, b in zip(found, more, strict=True)] if found else more
            del given, loss, weighted
        assert total is not None
        ctx.gradient, ctx.found = gradient, found
        ctx.mark_non_differentiable(total)
        return total, total * weight

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, found = ctx.gradient, ctx.found
        ctx.gradient = ctx.found = None
        return gradient, None, None, None, None, None, None, None, *found


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other


def _mean(logits: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The part of the mean that these tokens make: ``logits`` [tokens, classes], ``labels`` and their weights [tokens]."""
    wide = logits.to(_wide_dtype(logits))
    return torch.dot(functional.cross_entropy(wide, labels, ignore_index=NOT_LEARNT, reduction="none"), counts)


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
