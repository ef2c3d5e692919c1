"""Tries outer steps on held-out samples, before an exchange's vote. Nothing of the node's state changes by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtfm.node.host.work import WORK
from dtfm.node.model.bucket import HOST
from dtfm.node.model.optimizer.optimizer import try_outer_step
from dtfm.node.model.stage import Stage
from dtfm.protos.outer import OuterStep


def try_outer_steps(
    stage: Stage, outer_steps: Sequence[OuterStep], losses: Callable[[int], tuple[float, ...]]
) -> tuple[float, ...]:
    """The ``losses`` under each outer step, one after the other. The buckets' gradients are the sum of the exchange.

    ``losses`` is called with the outer step's place, while the stage computes with the weights that this outer step would make.
    The island's own weights are in the host's memory for that time, as the exchange may yet be given up.
    """
    buckets, found = stage.buckets, list[float]()
    own = {
        index: bucket.parameters.to(HOST, copy=True)
        for index, bucket in buckets.items()
        if stage.weights[index] is bucket.parameters
    }
    try:
        for place, outer in enumerate(outer_steps):
            for index, bucket in buckets.items():
                try_outer_step(outer, bucket, bucket.gradients, stage.weights[index])
                WORK.did()
            found += losses(place)
    finally:
        for index, bucket in buckets.items():
            if index in own:
                bucket.parameters.copy_(own[index])
            else:
                stage.refresh(index)
    return tuple(found)
