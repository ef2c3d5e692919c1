"""Repeats the round of another island. Both islands have a single node.

Where work is audited, all islands begin a round with the weights of the anchor, and with moments of zero. So
an island's changes in the round follow from its samples alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, starmap

import torch

from dtfm.node.model.bucket import HOST, Bucket
from dtfm.node.model.optimizer.optimizer import Terms, adamw, squared_norms
from dtfm.node.training.generation import Generation
from dtfm.node.training.step.compute import compute_these
from dtfm.protos.clipping import clip_coefficient
from dtfm.protos.control_pb2 import Audit

#: set_aside(sums): see StateStore.set_aside.
SetAside = Callable[[Mapping[int, torch.Tensor]], AbstractContextManager[None]]


@contextmanager
def round_done_again(
    generation: Generation, trained: Sequence[Audit.Trained], go_on: Callable[[], None], set_aside: SetAside
) -> Iterator[None]:
    """Inside, this node has the state of an island that has ``trained`` these steps since the last exchange. Afterwards it has
    its own state again, which was in the host's memory. ``go_on`` is called before each micro-batch; its error ends the round.
    Raises MemoryError if there is not enough."""
    buckets = generation.stage.buckets
    needed = sum(tensor.nbytes for bucket in buckets.values() for tensor in _written(bucket))
    if needed > generation.free_bytes:
        raise MemoryError(f"{needed:,} bytes are needed to put its own state aside, {generation.free_bytes:,} are free")
    own = {index: [tensor.to(HOST, copy=True) for tensor in _written(bucket)] for index, bucket in buckets.items()}
    with set_aside({index: gradients for index, (*_, gradients) in own.items()}):
        try:
            for index, bucket in buckets.items():
                bucket.parameters.copy_(bucket.shared[0])
                bucket.forget_moments()
                generation.stage.refresh(index)
            for number, step in enumerate(trained, start=1):
                _train(generation, number, step, go_on)
            yield
        finally:
            for index, tensors in own.items():
                for tensor, before in zip(_written(buckets[index]), tensors, strict=True):
                    tensor.copy_(before)
                generation.stage.refresh(index)


def _written(bucket: Bucket) -> tuple[torch.Tensor, ...]:
    return bucket.parameters, *bucket.moments, bucket.gradients


def _train(generation: Generation, number: int, step: Audit.Trained, go_on: Callable[[], None]) -> None:
    """As the ``number``-th step of a round, in the same operations as Generation."""
    borders, stage = step.borders, generation.stage
    of_step = [*chain.from_iterable(starmap(range, zip(borders[::2], borders[1::2], strict=False)))]
    compute = compute_these(generation.loaded, generation.placement, stage, of_step)
    stage.zero_gradients()
    for place in range(len(of_step)):
        go_on()
        scored = compute.loss(place, compute.inputs(place))
        torch.autograd.backward(scored.weighted)
    norm = math.sqrt(sum(squared_norms(bucket.gradients for _, bucket in sorted(stage.buckets.items()))))
    terms = Terms(clip_coefficient(norm, step.clip_norm), step.learning_rate, step.weight_decay)
    for index, bucket in stage.buckets.items():
        adamw(generation.run.train, number, terms, bucket, bucket.gradients)
        stage.refresh(index)
