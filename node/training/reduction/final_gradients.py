"""When each bucket's gradients of a step are final, so that their reduction can begin."""

from __future__ import annotations

from functools import partial

import torch

from dtfm.node.host.cuda_streams import after
from dtfm.node.model.stage import Stage
from dtfm.node.training.reduction.reducer import Final
from dtfm.node.transport.receiver import Arrival, TopicQueue


class FinalGradients:
    """Puts a Final for each of a stage's buckets into a reducer's ``queue``. Hooks count, during a step's last backward pass, the
    parameters that have their gradients. For one thread."""

    def __init__(self, stage: Stage, queue: TopicQueue[int, Arrival | Final]) -> None:
        self._stage = stage
        self._queue = queue
        self._step = 0
        self._unfinished: dict[int, int] = {}  # by bucket, the number of parameters that still get gradients
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, index))  # type: ignore[no-untyped-call]
            for index, parameters in stage.parameters.items()
            for parameter in parameters
        ]

    def expect(self, step: int) -> None:
        """The last backward pass of ``step`` begins, or is done already."""
        self._step = step
        self._unfinished = {index: len(parameters) for index, parameters in self._stage.parameters.items()}

    def tell_rest(self) -> None:
        """The last backward pass is over. A node without micro-batches, or a parameter without a gradient, adds nothing: that is
        final too."""
        for index in self._unfinished:
            self._tell(index)

    def forget(self) -> None:
        """The step has ended."""
        self._unfinished.clear()

    def remove(self) -> None:
        """Removes the hooks, which keep this object and the stage alive."""
        for hook in self._hooks:
            hook.remove()

    def _accumulated(self, bucket: int, _parameter: torch.Tensor) -> None:
        if bucket in self._unfinished:
            self._unfinished[bucket] -= 1
            if self._unfinished[bucket] == 0:
                del self._unfinished[bucket]
                self._tell(bucket)

    def _tell(self, bucket: int) -> None:
        self._queue.put(self._step, Final(bucket, after(self._stage.device)))
