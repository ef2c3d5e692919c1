"""Stages that pass micro-batches to each other compute what one process computes."""

from __future__ import annotations

import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtfm.kernels.codec import DTYPE_NUMBERS, Codec, decode, encode
from dtfm.node.model.loss import Scored
from dtfm.node.model.placement import Placement, placement_of
from dtfm.node.training.step.compute import Compute
from dtfm.node.training.step.pipeline import NonFinite, Outcome, TrainingStep, evaluate
from dtfm.node.training.step.progress import Progress
from dtfm.node.transport import receiver
from dtfm.node.transport.receiver import Arrival, Closed, Topic, TopicQueue
from dtfm.protos.frame import Header, Kind
from dtfm.scheduler.model.plan import Plan, Stage, from_routes

WIDTH, ROWS, MICRO_BATCHES = 6, 2, 5
STEP = 3


def plan(*sizes: int) -> Plan:
    """One layer per stage, with these numbers of replicas, which share the micro-batches."""
    stages = [Stage((i, i + 1), tuple(f"s{i}r{r}" for r in range(size)), ()) for i, size in enumerate(sizes)]
    width = max(sizes)
    per_route = Counter(m % width for m in range(MICRO_BATCHES))
    return from_routes(
        1, stages, [([s.replicas[r % len(s.replicas)] for s in stages], per_route[r]) for r in range(width)]
    )


class Queues:
    """What one node sends is in the other's queue at once."""

    def __init__(self, plan: Plan) -> None:
        self.queues: dict[str, TopicQueue[Topic, Arrival]] = {n: TopicQueue() for s in plan.stages for n in s.replicas}

    def send_from(self, node: str, kind: Kind, destination: str, number: int, tensor: torch.Tensor) -> None:
        encoded = memoryview(bytearray(encode(Codec.OFF, tensor).data))
        dtype = DTYPE_NUMBERS[tensor.dtype]
        header = Header(kind, Codec.OFF, dtype, 1, STEP, number, 0, tensor.numel(), len(encoded))
        topic: Topic = ("evaluate" if kind is Kind.EVALUATION else "train", STEP)
        self.queues[destination].put(topic, Arrival(node, header, encoded))


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def rows(number: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def squared(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (y - labels).square().mean()


def compute(module: nn.Module) -> Compute:
    shape = (ROWS, WIDTH)

    def forward(_number: int, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = module(x)
        return y

    def loss(number: int, x: torch.Tensor, only: object = None) -> Scored:
        mean = squared(module(x), rows(100 + number))
        return Scored(mean.detach(), mean / MICRO_BATCHES)

    return Compute(forward, loss, rows, shape, shape, torch.device("cpu"), ROWS)


def train_all(plan: Plan, modules: dict[str, nn.Module]) -> dict[str, Outcome]:
    queues = Queues(plan)

    def run(node: str) -> Outcome:
        placement = placement_of(plan, node, 0)
        assert placement is not None

        def send(kind: Kind, destination: str, number: int, tensor: torch.Tensor) -> None:
            queues.send_from(node, kind, destination, number, tensor)

        neighbours = (queues.queues[node], send, None)
        return TrainingStep(placement, Progress(1, STEP), compute(modules[node]), *neighbours, lambda: None).run()

    with ThreadPoolExecutor(len(modules)) as pool:
        return {n: f.result(timeout=30) for n, f in {n: pool.submit(run, n) for n in modules}.items()}


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (2, 1), (1, 2, 1), (2, 1, 3), (1, 1, 1, 1)])
def test_loss_and_gradients_are_those_of_the_whole_model(sizes: tuple[int, ...]) -> None:
    whole = nn.Sequential(*[layer(i) for i in range(len(sizes))])
    losses = [squared(whole(rows(n)), rows(100 + n)) for n in range(MICRO_BATCHES)]
    torch.autograd.backward(torch.stack(losses).mean())

    shape = plan(*sizes)
    modules = {n: layer(i) for i, s in enumerate(shape.stages) for n in s.replicas}
    outcomes = train_all(shape, modules)

    assert sum(o.loss_sum for o in outcomes.values()) / (ROWS * MICRO_BATCHES) == pytest.approx(
        torch.stack(losses).mean().item(), rel=1e-13
    )
    assert sum(o.samples for o in outcomes.values()) == ROWS * MICRO_BATCHES
    for stage, part in zip(shape.stages, whole, strict=True):
        for name, parameter in part.named_parameters():
            replicas = [modules[n].get_parameter(name).grad for n in stage.replicas]
            total = sum((g for g in replicas if g is not None), torch.zeros_like(parameter))
            torch.testing.assert_close(total, parameter.grad, rtol=1e-12, atol=1e-14)


def test_however_much_has_come_no_more_is_on_the_device_than_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients come when the next stage has all its earlier tensors."""
    placement = placement_of(plan(1, 1, 1), "s1r0", 0)
    assert placement is not None
    limit = placement.in_flight
    assert limit < MICRO_BATCHES
    queues = Queues(plan(1, 1, 1))
    queue = queues.queues["s1r0"]
    for number in range(MICRO_BATCHES):
        queues.send_from("s0r0", Kind.ACTIVATION, "s1r0", number, rows(number))
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most, sent = 0, list[int]()

    def decoded(*arguments: Any) -> torch.Tensor:
        nonlocal most
        tensor = decode(*arguments).clone()
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    def send(kind: Kind, _destination: str, number: int, _tensor: torch.Tensor) -> None:
        if kind is Kind.ACTIVATION:
            sent.append(number)
        if len(sent) == limit or number == MICRO_BATCHES - 1:
            while sent:
                queues.send_from("s2r0", Kind.GRADIENT, "s1r0", sent.pop(), rows(9))

    monkeypatch.setattr(receiver, "decode", decoded)
    neighbours = (queue, send, None)
    TrainingStep(placement, Progress(1, STEP), compute(layer(1)), *neighbours, lambda: None).run()
    assert most <= limit + 1  # and the gradient that the backward pass begins with


def test_evaluation_finds_the_loss_of_each_held_out_micro_batch_on_the_last_stage() -> None:
    shape = plan(1, 2)
    queues = Queues(shape)
    modules = {n: layer(i) for i, s in enumerate(shape.stages) for n in s.replicas}
    whole = nn.Sequential(layer(0), layer(1))

    def run(node: str) -> dict[int, float]:
        placement = placement_of(shape, node, 4)
        assert placement is not None

        def send(destination: str, number: int, tensor: torch.Tensor) -> None:
            queues.send_from(node, Kind.EVALUATION, destination, number, tensor)

        numbers, onward = placement.evaluation_micro_batches, placement.evaluation_next
        queue = queues.queues[node]
        losses = evaluate(placement, numbers, onward, ("evaluate", STEP), compute(modules[node]), queue, send)
        return dict(zip(placement.evaluation_micro_batches if placement.last else (), losses, strict=True))

    with ThreadPoolExecutor(3) as pool:
        results = [f.result(timeout=30) for f in [pool.submit(run, n) for n in modules]]
    found = {number: loss for result in results for number, loss in result.items()}
    assert found == pytest.approx({n: squared(whole(rows(n)), rows(100 + n)).item() for n in range(4)}, rel=1e-13)


def test_a_loss_that_is_not_finite_is_named() -> None:
    module = nn.Linear(WIDTH, WIDTH).double()
    nn.init.constant_(module.weight, float("inf"))
    with pytest.raises(NonFinite, match=r"the loss of micro-batch 0 is (nan|inf), of micro-batch 1 is (nan|inf), "):
        train_all(plan(1), {"s0r0": module})


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the scalars that the host would wait for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def step(placement: Placement, progress: Progress, queue: TopicQueue[Topic, Arrival] | None = None) -> TrainingStep:
    """Of a node with one layer. What it sends goes nowhere."""
    tensors = queue or TopicQueue(), lambda *_: None, None
    return TrainingStep(placement, progress, compute(layer(1)), *tensors, lambda: None)


def test_nothing_is_read_from_the_device_while_a_step_is_computed() -> None:
    shape = plan(1)
    placement = placement_of(shape, "s0r0", MICRO_BATCHES)
    assert placement is not None
    with Reads() as reads:
        step(placement, Progress(1, STEP)).run()
        numbers = placement.evaluation_micro_batches
        evaluate(placement, numbers, {}, ("evaluate", STEP), compute(layer(1)), TopicQueue(), lambda *_: None)
        assert reads.count == 0
        torch.ones(()).item()
    assert reads.count == 1


def test_losses_of_an_earlier_attempt_count() -> None:
    shape = plan(1)
    placement = placement_of(shape, "s0r0", 0)
    assert placement is not None
    whole, progress = step(placement, Progress(1, STEP)).run(), Progress(1, STEP)
    progress.losses[2] = squared(layer(1)(rows(2)), rows(102)).detach()
    progress.finished.add(2)
    assert step(placement, progress).run().loss_sum == whole.loss_sum


def test_a_step_that_is_called_off_ends() -> None:
    shape = plan(1, 1)
    placement = placement_of(shape, "s1r0", 0)
    assert placement is not None
    queue: TopicQueue[Topic, Arrival] = TopicQueue()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(step(placement, Progress(1, STEP), queue).run)
        queue.close("s0r0 left")
        with pytest.raises(Closed, match="s0r0 left"):
            waiting.result(timeout=30)


def test_earlier_stages_keep_more_in_flight() -> None:
    shape = plan(1, 1, 1)
    placements: list[Placement | None] = [placement_of(shape, f"s{i}r0", 0) for i in range(3)]
    limits = [s.in_flight for s in placements if s is not None]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] >= 1
