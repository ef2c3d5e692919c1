"""How much each label counts in a loss: where only some are learnt, each sample still counts as much as any other."""

from __future__ import annotations

import torch

from dtfm.node.data.samples import NOT_LEARNT


def label_weights(labels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight of each label in a micro-batch's mean loss, of the shape of ``labels`` ([b, ...]).

    The loss of a sample is the mean over its learnt labels, and that of a micro-batch, or of a step, the mean over its samples.
    So the weights of a sample's learnt labels are equal, and 1 / b together; a label that is not learnt has weight 0, and so has
    all of a sample with nothing to learn. A function of each sample alone: it does not matter where the others are computed.
    """
    learnt = (labels != NOT_LEARNT).to(dtype)
    each = learnt.flatten(1).sum(1) if labels.ndim > 1 else learnt
    share = 1 / (len(labels) * each.clamp(min=1))
    return learnt * share.view(-1, *[1] * (labels.ndim - 1))
