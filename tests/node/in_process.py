"""The nodes of one generation as threads of this process, without sockets or a coordinator. Generations, receivers, frames and
codecs are the product's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import torch

from dtfm.coordinator.core.step.commits import learning_rate
from dtfm.kernels.codec import Codec, Encoded
from dtfm.node.data.allowed import Allowed
from dtfm.node.data.dataset import Data
from dtfm.node.data.load import load_data
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.model import Model
from dtfm.node.model.placement import Placement, placement_of
from dtfm.node.model.precision import compute_dtype, run_dtype
from dtfm.node.model.stage import Stage, build_stage
from dtfm.node.training.adoption import inherit
from dtfm.node.training.generation import Generation, Inherited
from dtfm.node.training.step.pipeline import Outcome
from dtfm.node.transport.receiver import Closed, Receiver
from dtfm.node.transport.sender import Sender, What
from dtfm.protos.clipping import clip_coefficient
from dtfm.protos.control_pb2 import Commit, Device
from dtfm.protos.frame import frames
from dtfm.protos.outer import OuterStep
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model import plan as plans
from dtfm.scheduler.model.memory import Keeping
from dtfm.scheduler.model.plan import Plan
from tests.cluster.runs import write_corpus
from tests.node.dialling import dialler
from tests.node.load_once import load_once
from tests.node.model.initialised import initialise_all

Result = TypeVar("Result")


class DirectSender:
    """A Sender whose frames are in the other's receiver at once."""

    def __init__(self, node: str, receivers: Mapping[str, Receiver]) -> None:
        self._node = node
        self._receivers = receivers
        self.sent_bytes = 0
        self.on_sent: Callable[[], None] = lambda: None
        self._encoder = ThreadPoolExecutor(1, "encode")

    def encode(self, what: What, tensor: torch.Tensor, codec: Codec) -> Future[Encoded]:
        return Sender.encode(cast(Sender, self), what, tensor, codec)

    def send(self, destination: str, what: What, encoded: Future[Encoded]) -> None:
        data = encoded.result().data
        self.sent_bytes += len(data)
        for frame in frames(what.header(encoded.result()), data):
            self._receivers[destination].take(self._node, frame)
        self.on_sent()

    def close(self) -> None:
        self._encoder.shutdown()


CPU = torch.device("cpu")


class InProcess:
    """``with InProcess(...) as nodes: nodes.train()`` does what the plan's nodes do, each in a thread, from the initial weights.

    "auto" goes by the ``bandwidth`` of every link, in bytes per second, and the ``flops`` of every node. Each node has ``memory``
    bytes. They have the ``devices`` in turn.
    """

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
        devices: Sequence[torch.device] = (CPU,),
    ) -> None:
        model.set_optimizer(run.train.optimizer)
        self._loaded = LoadedRun(run, model, data, dialler("in process"), Allowed(["/"]))
        self._speed_of_links = bandwidth
        self._hardware = Device(kind=devices[0].type, memory_bytes=memory, host_memory_bytes=memory, flops=flops)
        self._receivers: dict[str, Receiver] = {}
        self.plan = plan
        self.outer = OuterStep(run.train.outer_rate, run.train.outer_momentum)  # of the next exchange
        self.look_at: tuple[OuterStep, ...] = ()  # what the next exchange tries before
        self.step = 0
        self.generations: dict[str, Generation] = {}
        self.held_out: dict[str, tuple[float, ...]] = {}  # of the last evaluation, by node
        self.senders = {name: DirectSender(name, self._receivers) for stage in plan.stages for name in stage.replicas}
        for name, device in zip(self.senders, itertools.cycle(devices), strict=False):
            placement = self._placement(name)
            stage = build_stage(
                model,
                *placement.layers,
                device,
                run_dtype(run),
                computes_in=compute_dtype(run),
                keeping=placement.keeping,
            )
            initialise_all(stage, run.seed)
            self._start(placement, stage, Inherited())
        self._threads = ThreadPoolExecutor(len(self.senders))

    def _placement(self, name: str) -> Placement:
        train, buckets = self._loaded.run.train, self._loaded.model.buckets
        held_out = train.evaluation_samples // train.micro_batch
        placement = placement_of(self.plan, name, held_out, buckets)
        assert placement is not None
        return placement

    def _start(self, placement: Placement, stage: Stage, inherited: Inherited) -> None:
        for bucket in stage.buckets.values() if placement.rounds.at_rest(self.step) else ():
            bucket.rest(rounds=placement.rounds.count > 0)
        sender = cast(Sender, self.senders[placement.node])
        bandwidth = dict.fromkeys(self.senders, self._speed_of_links)
        generation = Generation(self._loaded, placement, stage, self.step, sender, self._hardware, bandwidth, inherited)
        self.generations[placement.node] = generation
        self._receivers[placement.node] = generation.receiver

    def interrupt(self, sent: int) -> None:
        """Calls the next step off once ``sent`` tensors have been sent."""
        left = itertools.count(sent - 1, -1)

        def count_down() -> None:
            if next(left) <= 0:
                for generation in self.generations.values():
                    generation.close("called off")
                raise Closed("called off")

        for sender in self.senders.values():
            sender.on_sent = count_down
        for done in [self._threads.submit(generation.train, self.step + 1) for generation in self.generations.values()]:
            assert isinstance(done.exception(timeout=600), Closed | None)
        for sender in self.senders.values():
            sender.on_sent = lambda: None

    def go_on(self, plan: Plan) -> None:
        """The nodes of ``plan``, whose stages are as before, go on with the interrupted step, or the next one."""
        before, self.generations, self.plan = self.generations, {}, plan
        for generation in before.values():
            generation.close("another plan")
            generation.release()
        for name in (name for stage in plan.stages for name in stage.replicas):
            placement, earlier = self._placement(name), before[name]
            assert earlier.progress.fits(placement)
            earlier.progress.narrow(placement)
            inherited = inherit(earlier, earlier.stage, placement, self.step, earlier.progress)
            self._start(placement, earlier.stage, inherited)
        reports = {name: g.progress.report(g.placement) for name, g in self.generations.items()}
        for generation in self.generations.values():
            stage = generation.placement.stage
            following = plan.stages[stage + 1].replicas if stage + 1 < len(plan.stages) else ()
            previous = plan.stages[stage - 1].replicas if stage else ()
            generation.neighbours_have(
                [number for name in following for number in reports[name].activations],
                [number for name in previous for number in reports[name].gradients],
            )

    def begin_islands(self, plan: Plan, of: int) -> None:
        """Other nodes join between two steps: ``plan`` has their islands beside those that there are. They begin with the weights
        of the last exchange, and with the moments of the island ``of``."""
        before, self.generations, self.plan = self.generations, {}, plan
        for generation in before.values():
            generation.close("another plan")
            generation.release()
        own = (generation.stage.buckets for generation in before.values() if generation.placement.island == of)
        held = {index: bucket for buckets in own for index, bucket in buckets.items()}
        for name in plan.nodes:
            if name in before:
                placement, stage = self._placement(name), before[name].stage
                self._start(placement, stage, inherit(before[name], stage, placement, self.step, None))
                continue
            self.senders[name] = DirectSender(name, self._receivers)
            placement, run, model = self._placement(name), self._loaded.run, self._loaded.model
            buckets = {i: begun(bucket) for i, bucket in held.items() if bucket.spec.used_by(*placement.layers)}
            stage = build_stage(
                model,
                *placement.layers,
                CPU,
                run_dtype(run),
                computes_in=compute_dtype(run),
                keeping=placement.keeping,
                held=buckets,
            )
            for index in stage.buckets:
                stage.refresh(index)
            self._start(placement, stage, Inherited())
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(len(self.senders))

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generation in self.generations.values():
            generation.close("the end")
            generation.release()
        for sender in self.senders.values():
            sender.close()
        self._threads.shutdown()

    def train(self, *, commit: bool = True) -> float:
        """Trains the next step and returns its mean loss. Unless ``commit``, it is then aborted: nobody applies it."""
        done = self.train_unfinished()
        if commit:
            self.commit(done)
        return sum(outcome.loss_sum for outcome, _ in done.values()) / max(1, sum(o.samples for o, _ in done.values()))

    def train_unfinished(self) -> dict[str, tuple[Outcome, float]]:
        """By node, what `Generation.train` returns for the next step, which is neither committed nor aborted yet."""
        step = self.step + 1
        exchanges = self.plan.rounds.exchanges(step)

        def work(generation: Generation) -> tuple[Outcome, float]:
            if not exchanges:
                return generation.train(step)
            outcome, norm = generation.exchange(step)
            return (generation.look(step, self.look_at, outcome) if self.look_at else outcome), norm

        return dict(zip(self.generations, self._all(work), strict=True))

    def commit(self, done: Mapping[str, tuple[Outcome, float]]) -> None:
        step = self.step + 1
        train = self._loaded.run.train
        rate = learning_rate(train, step, rounds=self.plan.rounds)
        commit = Commit(step=step, learning_rate=rate, weight_decay=train.weight_decay)
        commit.outer.rate, commit.outer.momentum = self.outer.rate, self.outer.momentum
        for island in self.plan.islands:
            norm = math.sqrt(sum(done[stage.replicas[0]][1] for stage in island.stages))
            for stage in island.stages:
                first, past_last = stage.layers
                factor = clip_coefficient(norm, train.clip_norm)
                commit.clips.add(island=stage.island, first_layer=first, past_last_layer=past_last, factor=factor)
        self._all(lambda generation: generation.apply(commit))
        self.step = step

    def evaluate(self) -> float:
        """The mean held-out loss."""
        self.held_out = dict(
            zip(self.generations, self._all(lambda generation: generation.evaluate(self.step)), strict=True)
        )
        losses = [loss for mine in self.held_out.values() for loss in mine]
        return sum(losses) / len(losses)

    def _all(self, work: Callable[[Generation], Result]) -> list[Result]:
        running = [self._threads.submit(work, generation) for generation in self.generations.values()]
        return [each.result(timeout=600) for each in running]


def begun(of: Bucket) -> Bucket:
    """For a new island within a round: as of the last exchange, with the moments that ``of`` has now."""
    bucket, begin = Bucket(of.spec, of.device, of.parameters.dtype, of.home), of.parameters.nbytes
    bucket.load(of.read(shared=True), shared=True)
    bucket.rest(rounds=True)
    bucket.load(of.read(begin, begin + sum(moment.nbytes for moment in of.moments)), begin)
    return bucket


def even_plan(layers: int, stages: int, replicas: int, micro_batches: int, *keeping: Keeping) -> Plan:
    """``stages`` of nearly equal numbers of layers with ``replicas`` each, which keep their memory in the ways ``keeping``, in
    turn; nodes n0, n1, ... in pipeline order."""
    ways = tuple(keeping[replica % len(keeping)] for replica in range(replicas)) if keeping else ()
    borders = [layers * number // stages for number in range(stages + 1)]
    names = [[f"n{stage * replicas + replica}" for replica in range(replicas)] for stage in range(stages)]
    return plans.from_routes(
        1,
        [plans.Stage((borders[s], borders[s + 1]), tuple(names[s]), (), (), ways) for s in range(stages)],
        [([group[r] for group in names], micro_batches // replicas) for r in range(replicas)],
    )


def nodes_of(
    text: str,
    stages: int = 2,
    replicas: int = 2,
    *keeping: Keeping,
    flops: float = 1e12,
    memory: int = 1 << 30,
    devices: Sequence[torch.device] = (CPU,),
    allowed_modules: tuple[str, ...] = (),
) -> InProcess:
    """The nodes of an even plan for the run with this run file, which is written to the current folder, with its corpus."""
    write_corpus(Path())
    Path("run.toml").write_text(text)
    run = read_run_file(Path("run.toml")).message("test")
    data = load_data(run, allowed_modules)
    model = load_once(run.model, data.sample, allowed_modules)
    micro_batches = run.train.global_batch // run.train.micro_batch
    plan = even_plan(len(model.layers), stages, replicas, micro_batches, *keeping)
    return InProcess(run, plan, model, data, bandwidth=1e9, flops=flops, memory=memory, devices=devices)
