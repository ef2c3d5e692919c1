"""What a stage takes in memory while it trains a step, counted by torch's allocator, and what is planned for it."""

from __future__ import annotations

import gc
from functools import partial

import torch

from dtfm.kernels.codec import DTYPE_NUMBERS, Codec
from dtfm.node.model.cost.layer_costs import layer_costs
from dtfm.node.model.model import Model
from dtfm.node.model.placement import Placement, placement_of
from dtfm.node.model.precision import compute_dtype, run_dtype
from dtfm.node.model.stage import Stage, build_stage
from dtfm.node.training.step.compute import Compute
from dtfm.node.training.step.pipeline import TrainingStep
from dtfm.node.training.step.progress import Progress
from dtfm.node.transport.receiver import Arrival, Topic, TopicQueue
from dtfm.protos.frame import Header, Kind
from dtfm.protos.plan_pb2 import BF16, Run
from dtfm.scheduler.model import plan as plans
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from tests.node.allocated import most_allocated

CPU = torch.device("cpu")


def planned_bytes(model: Model, run: Run, layers: tuple[int, int], keeping: Keeping, in_flight: int) -> float:
    """Of the device and the host together, as the scheduler counts them."""
    costs = layer_costs(model, run)
    mine = costs[slice(*layers)]
    copy = 0.5 if run.train.precision == BF16 else 0.0
    if keeping.optimizer_state is OptimizerState.HOST:
        copy = copy or 1.0
    parameters = sum(layer.parameter_bytes for layer in mine)
    state = parameters * (4 + copy)
    if keeping.checkpointing is Checkpointing.NONE:
        kept = in_flight * sum(layer.kept_bytes for layer in mine)
        return state + kept + max(layer.working_bytes for layer in mine)
    inputs = sum(costs[n - 1].activation_bytes for n in range(*layers) if n)
    return state + in_flight * inputs + max(layer.kept_bytes + layer.working_bytes for layer in mine)


def measured_bytes(
    model: Model,
    run: Run,
    stage: int,
    layers: tuple[int, int],
    keeping: Keeping,
    in_flight: int,
    device: torch.device = CPU,
) -> int:
    """The most that tensors of stage ``stage`` (0 to 2, of 3) with these ``layers`` take while it trains a step of ``in_flight``
    + 2 micro-batches, with as many in flight as may be. (AdamW, which follows, works in small chunks when these are done.)"""
    placement = _placement(model, run, stage, layers, keeping, in_flight)

    def work() -> int:
        """Bytes of state in the host's memory beside the ``device``."""
        built = build_stage(model, *layers, device, run_dtype(run), computes_in=compute_dtype(run), keeping=keeping)
        assert all(bucket.moments for bucket in built.buckets.values())
        feed = _Feed(built, placement, run)
        TrainingStep(placement, Progress(1, 1), feed.compute, feed.queue, feed.sent, None, lambda: None).run()
        return built.state_bytes[1]

    if device.type != "cuda":
        return most_allocated(work)
    gc.collect()
    torch.zeros(1, device=device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    on_host = work()
    return torch.cuda.max_memory_allocated(device) - before + on_host


def _placement(
    model: Model, run: Run, stage: int, layers: tuple[int, int], keeping: Keeping, in_flight: int
) -> Placement:
    count = len(model.layers)
    first, past_last = layers
    borders = {0: [0, past_last, past_last + 1, count], 1: [0, first, past_last, count], 2: [0, 1, first, count]}[stage]
    stages = [
        plans.Stage((borders[s], borders[s + 1]), (f"n{s}",), (), (in_flight,), (keeping if s == stage else Keeping(),))
        for s in range(3)
    ]
    plan = plans.from_routes(1, stages, [(["n0", "n1", "n2"], in_flight + 2)])
    placement = placement_of(plan, f"n{stage}", 0, model.buckets)
    assert placement is not None
    assert placement.layers == layers
    return placement


class _Feed:
    """Neighbours that send a micro-batch whenever there is room for one, and gradients once the stage is full."""

    def __init__(self, stage: Stage, placement: Placement, run: Run) -> None:
        shape, train = stage.model.activation_shape, run.train
        self.queue: TopicQueue[Topic, Arrival] = TopicQueue()
        self._placement, self._dtype = placement, stage.dtype
        self._input = shape(stage.first - 1, train.micro_batch) if stage.first else ()
        self._output = shape(stage.past_last - 1, train.micro_batch)
        self._flying: list[int] = []
        self._forward = 0
        self._left = list(placement.micro_batches)
        zeros = partial(torch.zeros, dtype=torch.int64, device=stage.device)
        weight = 1 / len(placement.micro_batches)
        labels = zeros((train.micro_batch, *stage.model.layers[-1].output[:-1]))
        self.compute = Compute(
            forward=lambda _, x: stage.forward(x),
            loss=lambda _, x, only=None: stage.loss(x, labels, weight, None, only),
            inputs=lambda _: zeros((train.micro_batch, *stage.model.sample.shape)),
            input_shape=self._input,
            output_shape=self._output,
            device=stage.device,
            micro_batch=train.micro_batch,
        )
        for _ in range(1 if placement.last else placement.in_flight):
            self._let_in()

    def sent(self, kind: Kind, _destination: str, number: int, _tensor: torch.Tensor) -> None:
        if kind is Kind.GRADIENT:
            self._let_in()
            return
        self._flying.append(number)
        self._forward += 1
        at_end = self._forward == len(self._placement.micro_batches)
        while len(self._flying) == self._placement.in_flight or (at_end and self._flying):
            self._put(Kind.GRADIENT, self._flying.pop(0), self._output)

    def _let_in(self) -> None:
        if self._left and not self._placement.first:
            self._put(Kind.ACTIVATION, self._left.pop(0), self._input)

    def _put(self, kind: Kind, number: int, shape: tuple[int, ...]) -> None:
        tensor = torch.randn(shape, dtype=self._dtype) * 0.01
        header = Header(kind, Codec.OFF, DTYPE_NUMBERS[self._dtype], 1, 1, number, 0, tensor.numel(), tensor.nbytes)
        encoded = tensor.view(-1).view(torch.uint8).numpy().data
        self.queue.put(("train", 1), Arrival("neighbour", header, encoded))
