"""One step of this node's stage: computes whatever has arrived, backward before forward.

There is no timetable: 1F1B (one forward, one backward) arises because the number of micro-batches in flight is bounded.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dtfm.kernels.transfer import arriving
from dtfm.node.host.cuda_streams import DeviceWork
from dtfm.node.host.trace import Activity, span
from dtfm.node.host.work import WORK
from dtfm.node.model.placement import Placement
from dtfm.node.training.step.compute import Compute
from dtfm.node.training.step.progress import Progress
from dtfm.node.transport.commitments import Commitments
from dtfm.node.transport.receiver import Arrival, Topic, TopicQueue
from dtfm.protos.frame import Kind

QUEUED = 1
"""Passes that a GPU may have before it while the next one is chosen, so that it goes on meanwhile. What is chosen early may be a
forward pass although a gradient arrives right after."""

UNREAD = 4
"""Tensors of which a GPU has not said yet whether they are finite."""

#: send(kind, destination, micro-batch, tensor)
Send = Callable[[Kind, str, int, torch.Tensor], object]


class NonFinite(Exception):
    """A tensor is NaN or infinite. ``source``: the node that has sent it; empty: it was computed here."""

    def __init__(self, sentence: str, source: str = "") -> None:
        super().__init__(sentence)
        self.source = source


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """A bool tensor without dimensions: whether all its elements are, and their sum does not overflow. One pass, and no
    memory."""
    return torch.isfinite(tensor.sum())


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step.

    loss_sum: the losses of its micro-batches, each times its samples, if this node is of the last stage; otherwise 0.
    losses: of its micro-batches. Their mean over all micro-batches of the step is the step's loss.
    looked, looking_seconds, squared_change_norm: of an exchange, as in StepReady.
    The seconds in which the device computed, and the seconds in which this thread waited for peers. A GPU may compute while the
    thread waits, so the two may overlap.
    """

    loss_sum: float
    samples: int
    compute_seconds: float
    wait_seconds: float
    losses: tuple[float, ...] = ()
    looked: tuple[float, ...] = ()
    looking_seconds: float = 0.0
    squared_change_norm: float = 0.0


@dataclass(slots=True)
class TrainingStep:
    """Forward and backward of this node's micro-batches that ``progress`` lacks. Their gradients of the mean loss over
    the global batch are added to the parameters' ``.grad``.
    """

    _placement: Placement
    _progress: Progress
    _compute: Compute
    _queue: TopicQueue[Topic, Arrival]
    """Tensors of the neighbouring stages."""
    _send: Send
    """Hands a tensor on."""
    _commitments: Commitments | None
    """Takes the digests of the tensors that are used. None: work is not audited."""
    _before_last_backward: Callable[[], None]
    """Called once, or never if nothing is left to do, so that hooks can tell when each bucket's gradients are final."""
    _waiting: dict[int, None] = field(init=False)
    """The micro-batches that can go forward."""
    _left: int = field(init=False)
    """The number of micro-batches whose backward pass is not done."""
    _work: DeviceWork = field(init=False)
    _unread: deque[tuple[Callable[[], torch.Tensor], str, str]] = field(default_factory=deque)
    """For each tensor, whether it is finite (see `is_finite`), its description, and its sender."""
    _waited: float = 0.0

    def __post_init__(self) -> None:
        self._work = DeviceWork(self._compute.device)
        self._waiting = dict.fromkeys(self._progress.waiting(self._placement))
        self._left = len(set(self._placement.micro_batches) - self._progress.finished)

    def run(self) -> Outcome:
        """Computes whatever can be, backward first. Raises NonFinite, and Closed when the step is called off; ``progress`` then
        has the finished work."""
        placement, progress, queue = self._placement, self._progress, self._queue
        topic: Topic = ("train", progress.step)
        while self._left:
            self._work.wait(but=QUEUED)
            while (arrival := queue.get_nowait(topic)) is not None:
                self._take(arrival)
            # A gradient may come again before its forward is done again.
            ready = progress.gradients.keys() & progress.outputs.keys()
            if ready:
                number = min(ready)
                gradient = self._decoded(progress.gradients.pop(number), self._compute.output_shape)
                self._backward(number, progress.outputs.pop(number), gradient)
            elif self._waiting and len(progress.outputs) < placement.in_flight:
                (self._forward_and_backward if placement.last else self._forward)(min(self._waiting))
                WORK.did()
            else:
                began = time.perf_counter()
                with span(Activity.WAIT, progress.step):
                    arrival = queue.get(topic)
                self._waited += time.perf_counter() - began
                self._take(arrival)
        self._work.wait()
        self._read_finite(but=0)
        means = self._losses() if placement.last else ()
        micro_batch = self._compute.micro_batch
        return Outcome(sum(means, 0.0) * micro_batch, len(means) * micro_batch, self._work.seconds, self._waited, means)

    def _losses(self) -> tuple[float, ...]:
        """By micro-batch, the loss. Raises NonFinite."""
        numbers = self._placement.micro_batches
        means = _read([self._progress.losses[number] for number in numbers])
        wrong = [f"{number} is {mean}" for number, mean in zip(numbers, means, strict=True) if not math.isfinite(mean)]
        if wrong:
            raise NonFinite(f"the loss of micro-batch {', of micro-batch '.join(wrong)}")
        return tuple(means)

    def _look(self, tensor: torch.Tensor, what: str, source: str = "") -> None:
        """Raises NonFinite if the tensor is not finite. On a GPU, where nobody waits, it is raised a few tensors later."""
        self._unread.append((arriving(is_finite(tensor)), what, source))
        self._read_finite(but=UNREAD if tensor.is_cuda else 0)

    def _read_finite(self, but: int) -> None:
        while len(self._unread) > but:
            finite, what, source = self._unread.popleft()
            if not finite():
                raise NonFinite(f"{what}{f' from {source}' if source else ''} is NaN or infinite", source)

    def _take(self, arrival: Arrival) -> None:
        kind, number = arrival.header.kind, arrival.header.index
        if self._progress.has(kind, number):
            return  # in an earlier generation
        if self._commitments is not None:
            self._commitments.came(arrival)
        if kind is Kind.ACTIVATION:
            self._progress.activations[number] = arrival
            self._waiting[number] = None
        else:
            self._progress.gradients[number] = arrival

    def _decoded(self, arrival: Arrival, shape: tuple[int, ...]) -> torch.Tensor:
        """Decodes a tensor when its turn has come: the device has memory only for tensors in flight."""
        kind, number = arrival.header.kind, arrival.header.index
        with span(Activity.DECODE, self._progress.step, number):
            flat = arrival.decoded(self._compute.device)
        self._look(flat, f"the {kind.name.lower()} of micro-batch {number}", arrival.source)
        return flat.view(shape)

    def _enter(self, number: int) -> None:
        """The micro-batch is in flight from now on."""
        del self._waiting[number]
        if not self._placement.first:
            came = self._decoded(self._progress.activations.pop(number), self._compute.input_shape)
            self._progress.inputs[number] = came.requires_grad_()

    def _forward(self, number: int) -> None:
        placement, progress, compute = self._placement, self._progress, self._compute
        self._enter(number)
        with self._work.piece(), span(Activity.FORWARD, progress.step, number):
            y = compute.forward(number, self._input(number))
        # The graph alone: the output is needed for sending, and not for the backward pass. A stage that trains nothing and
        # begins with the data has none.
        progress.outputs[number] = get_gradient_edge(y) if y.requires_grad else None
        self._look(y.detach(), f"the output of micro-batch {number}")
        self._hand_on(Kind.ACTIVATION, placement.next[number], number, y.detach())

    def _forward_and_backward(self, number: int) -> None:
        """On the last stage: nothing is gained by holding the graph, and with the loss come some gradients (Stage.loss)."""
        progress, compute = self._progress, self._compute
        self._enter(number)
        with self._work.piece(), span(Activity.FORWARD, progress.step, number):
            scored = compute.loss(number, self._input(number))
        progress.losses[number] = scored.mean
        root = scored.weighted
        del scored
        self._backward(number, root, None)

    def _input(self, number: int) -> torch.Tensor:
        return self._compute.inputs(number) if self._placement.first else self._progress.inputs[number]

    def _backward(self, number: int, root: torch.Tensor | GradientEdge | None, gradient: torch.Tensor | None) -> None:
        placement, progress = self._placement, self._progress
        self._left -= 1
        if self._left == 0:
            self._before_last_backward()
        with self._work.piece(), span(Activity.BACKWARD, progress.step, number):
            if root is not None:
                torch.autograd.backward(root, gradient)
        progress.finished.add(number)
        WORK.did()
        if not placement.first:
            entered = progress.inputs.pop(number).grad
            assert entered is not None
            self._look(entered, f"the gradient of the input of micro-batch {number}")
            self._hand_on(Kind.GRADIENT, placement.previous[number], number, entered)

    def _hand_on(self, kind: Kind, destination: str, number: int, tensor: torch.Tensor) -> None:
        """Sending waits while the link is full, which does not count as computing."""
        began = time.perf_counter()
        self._send(kind, destination, number, tensor)
        self._waited += time.perf_counter() - began


@torch.no_grad()
def evaluate(
    placement: Placement,
    numbers: Sequence[int],
    onward: Mapping[int, str],
    topic: Topic,
    compute: Compute,
    queue: TopicQueue[Topic, Arrival],
    send: Callable[[str, int, torch.Tensor], object],
) -> tuple[float, ...]:
    """The loss of each of this node's held-out micro-batches, ``numbers``, in ascending order; empty unless on the last stage.
    ``onward``: by number, the node that gets the output. Raises Closed."""
    losses = dict[int, torch.Tensor]()
    for number in numbers:
        WORK.did()
        if placement.first:
            x = compute.inputs(number)
        else:
            arrival = queue.get(topic)
            number, x = arrival.header.index, arrival.decoded(compute.device).view(compute.input_shape)
        if placement.last:
            losses[number] = compute.loss(number, x).mean
        else:
            y = compute.forward(number, x)
            send(onward[number], number, y)
    return tuple(_read([losses[number] for number in sorted(losses)]))


def _read(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The values of the scalars. The host waits for them once."""
    return [float(value) for value in torch.stack(list(scalars)).tolist()] if scalars else []
