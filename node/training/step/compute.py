"""What a micro-batch's computing needs on this node: its samples, the stage, and how much its labels count in the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap
from typing import Protocol

import numpy as np
import torch

from dtfm.node.data.dataset import Batch, Indices
from dtfm.node.data.samples import evaluation_samples
from dtfm.node.host.cuda_streams import brought
from dtfm.node.model.dropout import MicroBatch, dropping
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.loss import Scored
from dtfm.node.model.placement import Placement
from dtfm.node.model.stage import Stage
from dtfm.node.training.step.loss_weights import LossWeights, Part, by_sample, by_token


class Loss(Protocol):
    """Computes the loss of a micro-batch on the last stage: see Compute."""

    def __call__(self, number: int, x: torch.Tensor, only: Sequence[torch.nn.Parameter] | None = None, /) -> Scored: ...


@dataclass(frozen=True, slots=True)
class Compute:
    """The pipeline's view of the model and the data, by the number of a micro-batch. The shapes are of the stage's input and
    output."""

    forward: Callable[[int, torch.Tensor], torch.Tensor]
    """Maps a micro-batch and the stage's input to its output."""
    loss: Loss
    """Maps a micro-batch and the last stage's input to its loss, weighted as the step needs it (see LossWeights). With parameters
    as a third argument, their gradients are apart, as with ``only`` in Stage.loss."""
    inputs: Callable[[int], torch.Tensor]
    """Of a micro-batch, the first stage's input."""
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    device: torch.device
    micro_batch: int
    """In samples."""


def compute_step(loaded: LoadedRun, placement: Placement, stage: Stage, step: int) -> Compute:
    """The functions that compute any micro-batch of ``step``."""
    rounds, of_step = placement.rounds, placement.all_micro_batches
    taken = placement.owed.taken(rounds.batches(step - 1), range(of_step), of_step // rounds.batches_each)
    numbers = [*chain.from_iterable(starmap(range, taken))]
    weights = _weights(loaded, placement, numbers, placement.places)
    return _compute(loaded, stage, partial(_training_batch, loaded, numbers), weights, numbers)


def compute_these(loaded: LoadedRun, placement: Placement, stage: Stage, of_step: Sequence[int]) -> Compute:
    """The same for a step that has these micro-batches of the run, all of them of one island."""
    weights = _weights(loaded, placement, of_step, range(len(of_step)))
    return _compute(loaded, stage, partial(_training_batch, loaded, of_step), weights, of_step)


def compute_held_out(loaded: LoadedRun, placement: Placement, stage: Stage, first: int = 0) -> Compute:
    """The functions that compute any held-out micro-batch, counted from the micro-batch ``first`` on."""
    weights = _weights_of_held_out(loaded, placement)
    return _compute(loaded, stage, lambda number: _evaluation_batch(loaded, first + number), weights)


def _compute(
    loaded: LoadedRun,
    stage: Stage,
    batch: Callable[[int], Batch],
    weights: LossWeights,
    trained: Sequence[int] | None = None,
) -> Compute:
    """``trained``: the micro-batches of the run that these are; None: they are held out, and nothing is dropped."""
    train, shape, seed = loaded.run.train, stage.model.activation_shape, loaded.run.seed

    def positions(number: int) -> torch.Tensor | None:
        if not loaded.data.sample.isolated:
            return None
        found = loaded.data.positions(batch(number)[0])
        return None if found is None else brought(found, stage.device)

    def of_run(number: int) -> MicroBatch | None:
        return None if trained is None else MicroBatch(seed, trained[number])

    def forward(number: int, x: torch.Tensor) -> torch.Tensor:
        with dropping(of_run(number)):
            return stage.forward(x, positions(number))

    def loss(number: int, x: torch.Tensor, only: Sequence[torch.nn.Parameter] | None = None) -> Scored:
        labels = brought(batch(number)[1], stage.device)
        with dropping(of_run(number)):
            scored = stage.loss(x, labels, weights.micro_batch, positions(number), only, weights.label)
        return Scored(scored.mean * weights.told, scored.weighted)

    return Compute(
        forward=forward,
        loss=loss,
        inputs=lambda number: brought(batch(number)[0], stage.device),
        input_shape=shape(stage.first - 1, train.micro_batch) if stage.first else (),
        output_shape=shape(stage.past_last - 1, train.micro_batch),
        device=stage.device,
        micro_batch=train.micro_batch,
    )


def _weights(loaded: LoadedRun, placement: Placement, of_step: Sequence[int], places: range) -> LossWeights:
    """``of_step``: the micro-batches of the run that a step has. ``places``: of them, the island's."""
    if not _counts_tokens(loaded, placement):
        return by_sample(len(places))

    def learnt(numbers: Sequence[int]) -> Part:
        samples = np.concatenate([_samples(loaded, number) for number in numbers])
        return Part(len(numbers), loaded.data.training_learnt(samples))

    of_island = learnt(of_step[places.start : places.stop])
    return by_token(of_island, learnt(of_step) if len(places) < len(of_step) else of_island)


def _weights_of_held_out(loaded: LoadedRun, placement: Placement) -> LossWeights:
    train, data = loaded.run.train, loaded.data
    number = train.evaluation_samples // train.micro_batch
    if not _counts_tokens(loaded, placement):
        return by_sample(number)
    samples = evaluation_samples(0, micro_batch=train.evaluation_samples, count=data.evaluation_count)
    whole = Part(number, data.evaluation_learnt(samples))
    return by_token(whole, whole)


def _counts_tokens(loaded: LoadedRun, placement: Placement) -> bool:
    """Whether this node needs the numbers of learnt tokens: a node without the last layer computes no loss, and may not have the
    samples."""
    return loaded.run.train.loss_per_token and placement.last


def _samples(loaded: LoadedRun, number: int) -> Indices:
    """The training samples of a micro-batch of the run."""
    return loaded.data.training_samples(loaded.run.seed, number, loaded.run.train.micro_batch)


def _training_batch(loaded: LoadedRun, of_step: Sequence[int], number: int) -> Batch:
    """``of_step``: which micro-batches of the run a step has."""
    return loaded.data.training_batch(_samples(loaded, of_step[number]))


def _evaluation_batch(loaded: LoadedRun, number: int) -> Batch:
    data, train = loaded.data, loaded.run.train
    number %= train.evaluation_samples // train.micro_batch  # strangers compute each twice: see held_out_chains
    indices = evaluation_samples(number, micro_batch=train.micro_batch, count=data.evaluation_count)
    return data.evaluation_batch(indices)
