"""One step of this node's stage: computes whatever has arrived, backward before forward.

There is no timetable: 1F1B (one forward, one backward) arises because the number of micro-batches in flight is bounded.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dtfm.kernels.codec import DTYPES, Codec, decode
from dtfm.node.host.device import finish
from dtfm.node.host.trace import Activity, span
from dtfm.node.model.placement import Share
from dtfm.node.training.progress import Progress
from dtfm.node.transport.receiver import Arrival
from dtfm.node.transport.topic_queue import Mailbox
from dtfm.protos.frame import Kind

#: What arrives for the pipeline, by kind of work and step.
Topic = tuple[Literal["train", "evaluate"], int]

#: send(kind, destination, micro-batch, tensor)
Send = Callable[[Kind, str, int, torch.Tensor], object]


class Direction(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


def next_task(
    forward: Collection[int], backward: Collection[int], in_flight: int, limit: int
) -> tuple[Direction, int] | None:
    """What to compute next, of the micro-batches whose input (``forward``) or output gradient (``backward``) is here.

    ``in_flight`` have gone forward but not backward. None: nothing to do until something arrives.
    """
    if backward:
        return Direction.BACKWARD, min(backward)
    if forward and in_flight < limit:
        return Direction.FORWARD, min(forward)
    return None


class NonFinite(Exception):
    """The loss, or a gradient, is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``loss_sum`` over this node's samples where it is of the last stage, else 0; seconds of wall time."""

    loss_sum: float
    samples: int
    compute_seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Compute:
    """What the pipeline needs of the model and the data.

    ``forward``: stage input to output. ``loss``: (last stage's output, labels) to the mean over samples, a scalar.
    ``inputs`` and ``labels``: of a micro-batch. ``activation_shape``: of this stage's input.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    inputs: Callable[[int], torch.Tensor]
    labels: Callable[[int], torch.Tensor]
    activation_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    device: torch.device


def train_step(
    share: Share,
    progress: Progress,
    micro_batch: int,
    global_batch: int,
    compute: Compute,
    mailbox: Mailbox[Topic, Arrival],
    send: Send,
    before_last_backward: Callable[[], None],
) -> Outcome:
    """Forward and backward of those of this node's micro-batches that ``progress`` lacks; their gradients of the mean loss over
    ``global_batch`` samples are added to the parameters' ``.grad``.

    Calls ``before_last_backward`` once, or never where nothing is left to do, so that hooks can tell when each bucket's
    gradients are final. Raises NonFinite, and Closed when the step is called off; then ``progress`` is what was done.
    """
    step = progress.step
    topic: Topic = ("train", step)
    waiting = dict.fromkeys(progress.waiting(share))
    inputs, outputs, gradients = progress.inputs, progress.outputs, progress.gradients
    weight = micro_batch / global_batch
    left = len(set(share.micro_batches) - progress.finished)
    busy = waited = 0.0

    def hand_on(kind: Kind, destination: str, number: int, tensor: torch.Tensor) -> None:
        """Where a link is full this waits for it, which is no computing."""
        nonlocal busy, waited
        began = time.perf_counter()
        send(kind, destination, number, tensor)
        seconds = time.perf_counter() - began
        busy, waited = busy - seconds, waited + seconds

    def take(arrival: Arrival) -> None:
        header = arrival.header
        if progress.has(header.kind, header.index):
            return  # from an earlier generation
        with span(Activity.DECODE, step, header.index):
            flat = decode(Codec(header.codec), arrival.encoded, header.elements, DTYPES[header.dtype], compute.device)
        if header.kind is Kind.ACTIVATION:
            inputs[header.index] = flat.view(compute.activation_shape).requires_grad_()
            waiting[header.index] = None
        else:
            gradients[header.index] = flat.view(compute.output_shape)

    while left:
        while (arrival := mailbox.get_nowait(topic)) is not None:
            take(arrival)
        # A gradient may come again before its forward is done again.
        task = next_task(waiting, gradients.keys() & outputs.keys(), len(outputs), share.in_flight)
        if task is None:
            began = time.perf_counter()
            with span(Activity.WAIT, step):
                arrival = mailbox.get(topic)
            waited += time.perf_counter() - began
            take(arrival)
            continue
        direction, number = task
        began = time.perf_counter()
        if direction is Direction.FORWARD:
            del waiting[number]
            with span(Activity.FORWARD, step, number):
                x = compute.inputs(number) if share.first else inputs[number]
                y = compute.forward(x)
                if share.last:
                    loss = compute.loss(y, compute.labels(number))
                    value = loss.item()
                finish(compute.device)  # what comes next is for then to decide
            if share.last:
                if not torch.isfinite(loss):
                    raise NonFinite(f"the loss of micro-batch {number} is {value}")
                progress.losses[number] = value
                outputs[number] = loss
                # The last stage turns round at once: nothing is gained by holding the graph.
                gradients[number] = torch.full_like(loss, weight)
            else:
                outputs[number] = y
                hand_on(Kind.ACTIVATION, share.next[number], number, y.detach())
        else:
            left -= 1
            if left == 0:
                before_last_backward()
            with span(Activity.BACKWARD, step, number):
                torch.autograd.backward(outputs.pop(number), gradients.pop(number))
                finish(compute.device)
            progress.finished.add(number)
            if not share.first:
                gradient = inputs.pop(number).grad
                assert gradient is not None
                hand_on(Kind.GRADIENT, share.previous[number], number, gradient)
        busy += time.perf_counter() - began
    if not share.last:
        return Outcome(0.0, 0, busy, waited)
    loss_sum = sum(progress.losses[number] for number in share.micro_batches) * micro_batch
    return Outcome(loss_sum, len(share.micro_batches) * micro_batch, busy, waited)


@torch.no_grad()
def evaluate(
    share: Share,
    step: int,
    micro_batch: int,
    compute: Compute,
    mailbox: Mailbox[Topic, Arrival],
    send: Send,
) -> tuple[float, int]:
    """(sum of the losses, samples) over this node's held-out micro-batches; (0, 0) but on the last stage. Raises Closed."""
    loss_sum = 0.0
    numbers: Sequence[int] = share.evaluation_micro_batches
    for turn in range(len(numbers)):
        if share.first:
            number, x = numbers[turn], compute.inputs(numbers[turn])
        else:
            arrival = mailbox.get(("evaluate", step))
            header = arrival.header
            flat = decode(Codec(header.codec), arrival.encoded, header.elements, DTYPES[header.dtype], compute.device)
            number, x = header.index, flat.view(compute.activation_shape)
        y = compute.forward(x)
        if share.last:
            loss_sum += compute.loss(y, compute.labels(number)).item() * micro_batch
        else:
            send(Kind.EVALUATION, share.evaluation_next[number], number, y)
    return loss_sum, len(numbers) * micro_batch if share.last else 0
