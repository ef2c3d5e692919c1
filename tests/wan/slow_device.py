"""The node's command with a slower device: ``python -m tests.wan.slow_device FLOPS join ...``.

As a GPU, the device takes work into a queue and is done with it later, at FLOPS. The CPU computes the same work in a part of
that time, and the thread that waits for the device sleeps for the rest. So nodes that share this machine's cores are as unequal
as asked for, and threads that send and receive are as quick as ever. The node measures this device as any other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from dtfm.node import cli
from dtfm.node.host.cuda_streams import DeviceWork
from dtfm.node.model.cost import layer_costs
from dtfm.node.model.loss import Scored
from dtfm.node.model.stage import Stage
from dtfm.node.training.step import pipeline

Result = TypeVar("Result")


class SlowDevice:
    """A device of ``flops`` FLOP/s that does one thing after the other. For one thread."""

    def __init__(
        self,
        flops: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._flops = flops
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0

    def queue(self, flops: float) -> None:
        """More work, which begins when the work before it is done."""
        self._free_at = max(self._free_at, self._clock()) + flops / self._flops

    def wait(self) -> None:
        """Returns when all work is done."""
        if (left := self._free_at - self._clock()) > 0:
            self._sleep(left)


@contextmanager
def slowed(device: SlowDevice) -> Iterator[None]:
    """A context in which this process computes on ``device``: passes through stages, and the products that a node times."""
    forward, loss, product = Stage.forward, Stage.loss, torch.mm

    def queue_passes(
        stage: Stage, x: torch.Tensor, compute: Callable[[], Result], root: Callable[[Result], Tensor]
    ) -> Result:
        """The forward pass now; the backward pass when it gets to ``root`` of what ``compute`` returns."""
        layers = stage.model.layers[stage.first : stage.past_last]
        flops = len(x) * sum(layer.flops for layer in layers)
        backward = len(x) * sum(map(stage.model.backward_flops, range(stage.first, stage.past_last)))
        device.queue(flops)
        computed = compute()
        if root(computed).requires_grad:
            root(computed).register_hook(lambda _: device.queue(backward))  # type: ignore[no-untyped-call]
        return computed

    def slow_forward(stage: Stage, x: Tensor, *rest: Any) -> Tensor:
        return queue_passes(stage, x, lambda: forward(stage, x, *rest), lambda y: y)

    def slow_loss(stage: Stage, x: Tensor, labels: Tensor, *rest: Any) -> Scored:
        return queue_passes(stage, x, lambda: loss(stage, x, labels, *rest), lambda scored: scored.weighted)

    def slow_product(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        device.queue(2.0 * a.shape[0] * a.shape[1] * b.shape[1])
        result = product(a, b, **options)
        device.wait()
        return result

    def wait(_: torch.device) -> None:
        device.wait()

    class SlowWork(DeviceWork):
        @contextmanager
        def piece(self) -> Iterator[None]:
            with super().piece():
                yield
                device.wait()

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Stage, "forward", slow_forward))
        patches.enter_context(mock.patch.object(Stage, "loss", slow_loss))
        patches.enter_context(mock.patch.object(torch, "mm", slow_product))
        patches.enter_context(mock.patch.object(layer_costs, "wait_until_computed", wait))
        patches.enter_context(mock.patch.object(pipeline, "DeviceWork", SlowWork))
        yield


def main() -> None:
    flops = float(sys.argv.pop(1))
    with slowed(SlowDevice(flops)):
        cli.main()


if __name__ == "__main__":
    main()
