"""The nodes of one generation as threads of this process: engagements, inboxes, frames and codecs are the product's own, what
they lack is sockets and a coordinator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar, cast

import torch

from dtfm.kernels.codec import DTYPE_NUMBERS, Codec, Encoded, encode
from dtfm.node.data.dataset import Data
from dtfm.node.model.model import Model
from dtfm.node.model.stage import Stage, build_stage
from dtfm.node.training.generation import Engagement
from dtfm.node.model.placement import Share, group_of, share_of
from dtfm.node.training.progress import Progress
from dtfm.node.transport.receiver import Inbox
from dtfm.node.transport.sender import Outbox, What
from dtfm.node.transport.topic_queue import Closed
from dtfm.protos.control_pb2 import Device
from dtfm.protos.frame import Header, frames
from dtfm.protos.plan_pb2 import FP64, Plan, Run

Result = TypeVar("Result")


class Wire:
    """An Outbox whose frames are in the other's inbox at once."""

    def __init__(self, node: str, inboxes: Mapping[str, Inbox]) -> None:
        self._node = node
        self._inboxes = inboxes
        self.sent_bytes = 0
        self.on_sent: Callable[[], None] = lambda: None

    def send(self, destination: str, what: What, tensor: torch.Tensor, codec: Codec) -> Future[Encoded]:
        sent = Future[Encoded]()
        sent.set_result(encode(codec, tensor))
        self.send_encoded(destination, what, sent.result(), tensor.numel(), tensor.dtype)
        return sent

    def send_encoded(self, destination: str, what: What, encoded: Encoded, elements: int, dtype: torch.dtype) -> None:
        size = len(encoded.data)
        number = DTYPE_NUMBERS[dtype]
        header = Header(
            what.kind, encoded.codec, number, what.generation, what.step, what.index, what.part, elements, size
        )
        self.sent_bytes += size
        for frame in frames(header, encoded.data):
            self._inboxes[destination].take(self._node, frame)
        self.on_sent()


CPU = torch.device("cpu")


class InProcess:
    """``with InProcess(...) as nodes: nodes.train()``: what the plan's nodes do, each in a thread, from the weights at the start
    on. ``bandwidth`` of every link in bytes per second and ``flops`` of every node are what "auto" goes by; each has ``memory``
    bytes."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        model: Model,
        data: Data,
        *,
        bandwidth: float,
        flops: float,
        memory: int = 1 << 30,
        device: torch.device = CPU,
    ) -> None:
        self._run, self._data, self._bandwidth = run, data, bandwidth
        self._hardware = Device(kind=device.type, memory_bytes=memory, flops=flops)
        self._inboxes: dict[str, Inbox] = {}
        self._plan = plan
        self.step = 0
        self.engagements: dict[str, Engagement] = {}
        self.wires = {name: Wire(name, self._inboxes) for stage in plan.stages for name in stage.replicas}
        dtype = torch.float64 if run.train.precision == FP64 else torch.float32
        for name in self.wires:
            share = self._share(name)
            stage = build_stage(model, *share.layers, device, dtype)
            stage.initialise(run.seed)
            self._engage(share, stage, None)
        self._threads = ThreadPoolExecutor(len(self.wires))

    def _share(self, name: str) -> Share:
        share = share_of(self._plan, name, self._run.train.evaluation_samples // self._run.train.micro_batch)
        assert share is not None
        return share

    def _engage(self, share: Share, stage: Stage, progress: Progress | None) -> None:
        groups = {index: group_of(self._plan, bucket.spec.layers) for index, bucket in stage.buckets.items()}
        outbox = cast(Outbox, self.wires[share.node])
        links = dict.fromkeys(self.wires, self._bandwidth)
        engagement = Engagement(
            self._run, share, groups, stage, self._data, outbox, self.step, links, self._hardware, progress
        )
        self.engagements[share.node] = engagement
        self._inboxes[share.node] = engagement.inbox

    def interrupt(self, sent: int) -> None:
        """The next step is called off once so many tensors have been sent."""
        left = itertools.count(sent - 1, -1)

        def count_down() -> None:
            if next(left) <= 0:
                for engagement in self.engagements.values():
                    engagement.close("called off")
                raise Closed("called off")

        for wire in self.wires.values():
            wire.on_sent = count_down
        for done in [self._threads.submit(engagement.train, self.step + 1) for engagement in self.engagements.values()]:
            assert isinstance(done.exception(timeout=600), Closed | None)
        for wire in self.wires.values():
            wire.on_sent = lambda: None

    def go_on(self, plan: Plan) -> None:
        """The nodes of ``plan``, whose stages are as before, take the interrupted step up where they were."""
        before, self.engagements, self._plan = self.engagements, {}, plan
        for engagement in before.values():
            engagement.close("another plan")
            engagement.release()
        for name in (name for stage in plan.stages for name in stage.replicas):
            share, progress = self._share(name), before[name].progress
            assert progress.fits(share)
            progress.narrow(share)
            self._engage(share, before[name].stage, progress)
        reports = {name: e.progress.told(e.share) for name, e in self.engagements.items()}
        for engagement in self.engagements.values():
            stage = engagement.share.stage
            following = plan.stages[stage + 1].replicas if stage + 1 < len(plan.stages) else ()
            previous = plan.stages[stage - 1].replicas if stage else ()
            engagement.neighbours_have(
                [number for name in following for number in reports[name].activations],
                [number for name in previous for number in reports[name].gradients],
            )

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engagement in self.engagements.values():
            engagement.close("the end")
            engagement.release()
        self._threads.shutdown()

    def train(self, *, commit: bool = True) -> float:
        """The next step's mean loss. Unless ``commit``, the step is aborted once all have done their part: nobody applies it."""
        step = self.step + 1
        done = self._all(lambda engagement: engagement.train(step))
        if commit:
            voted = dict(zip(self.engagements, (squared for _, squared in done), strict=True))
            norm = math.sqrt(sum(voted[stage.replicas[0]] for stage in self._plan.stages))
            self._all(lambda engagement: engagement.apply(step, norm))
            self.step = step
        return sum(outcome.loss_sum for outcome, _ in done) / sum(outcome.samples for outcome, _ in done)

    def evaluate(self) -> float:
        """The mean held-out loss."""
        done = self._all(lambda engagement: engagement.evaluate(self.step))
        return sum(loss for loss, _ in done) / sum(samples for _, samples in done)

    def _all(self, work: Callable[[Engagement], Result]) -> list[Result]:
        running = [self._threads.submit(work, engagement) for engagement in self.engagements.values()]
        return [each.result(timeout=600) for each in running]


def even_plan(layers: int, stages: int, replicas: int, micro_batches: int) -> Plan:
    """``stages`` of about as many layers, ``replicas`` each; nodes n0, n1, ... in pipeline order."""
    borders = [layers * number // stages for number in range(stages + 1)]
    names = [[f"n{stage * replicas + replica}" for replica in range(replicas)] for stage in range(stages)]
    return Plan(
        generation=1,
        stages=[
            Plan.Stage(first_layer=borders[s], past_last_layer=borders[s + 1], replicas=names[s]) for s in range(stages)
        ],
        routes=[
            Plan.Route(nodes=[group[r] for group in names], micro_batches=micro_batches // replicas)
            for r in range(replicas)
        ],
    )
