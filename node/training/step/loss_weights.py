"""How much the labels of a step count in its loss.

With `train.loss_per = "sample"` each sample counts alike, whatever the others are. With "token" each learnt label of the step
counts alike. So its weight depends on how many labels the whole step learns. That number follows from the data and from the
step's number. Each node that computes a loss has all samples, and counts by itself.

With rounds an island trains the mean over the learnt labels of its own part of a step. The exchange weighs islands by their
samples, since AdamW's changes do not grow with the number of labels. The loss of a step is the mean over the learnt labels of all
islands.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossWeights:
    """The weights in the loss of a step."""

    label: float | None
    """The weight of each learnt label in the loss of its micro-batch. None: the labels of a sample share the sample's weight (see
    label_weights)."""
    micro_batch: float
    """The weight of a micro-batch's loss in the loss that the island trains."""
    told: float = 1.0
    """Votes tell a micro-batch's loss times this. The mean over all micro-batches is then the loss of the step."""


@dataclass(frozen=True, slots=True)
class Part:
    """The number of micro-batches in a part of a step, and of the labels that are learnt there."""

    micro_batches: int
    learnt: int

    @property
    def weight(self) -> float:
        """Of each learnt label in its micro-batch's loss: then the mean of these losses is the mean over the learnt labels."""
        return self.micro_batches / self.learnt


def by_sample(micro_batches: int) -> LossWeights:
    """The weights where each sample counts alike, for an island with this number of a step's ``micro_batches``."""
    return LossWeights(None, 1 / micro_batches)


def by_token(of_island: Part, of_step: Part) -> LossWeights:
    """The weights where each learnt label counts alike, for an island with this part of a step."""
    return LossWeights(of_island.weight, 1 / of_island.micro_batches, of_step.weight / of_island.weight)
