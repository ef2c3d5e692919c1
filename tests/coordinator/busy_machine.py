"""Four equal nodes on a machine that others use too: a run without processes, for thousands of steps, that shows how often plans
change for noise alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Pausing, Stepping, Switching
from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.script import LAYERS, World, fresh_state

NODES = ("a", "b", "c", "d")
MICRO_BATCHES = 32
WORK = 3 * LAYERS * 1e9
"""FLOPs of one micro-batch."""
FLOPS = MICRO_BATCHES / len(NODES) * WORK / 0.1
"""With these, a step of equal shares takes 0.1 s."""
LEAST_GAIN = 0.03

Slowness = Callable[[float], Mapping[str, float]]
"""By how much each node is slower than a quiet machine's in the step that begins then."""


def quiet(now: float) -> Mapping[str, float]:
    return dict.fromkeys(NODES, 1.0)


def busy(seed: int) -> Slowness:
    """What other programs on the machine do. Each step differs a little. All nodes slow down and recover together over minutes.
    Now and then something disturbs one of them, often briefly and sometimes for a minute."""
    random = Random(seed)
    ends, times = dict.fromkeys(NODES, 0.0), dict.fromkeys(NODES, 1.0)
    together, last = 0.0, 0.0

    def slowness(now: float) -> Mapping[str, float]:
        nonlocal together, last
        passed, last = (now - last if last else 0.0), now
        kept = math.exp(-passed / 30)
        together = kept * together + random.gauss(0, 0.2) * math.sqrt(1 - kept * kept)
        found = {}
        for node in NODES:
            if now > ends[node]:
                times[node] = 1.0
                if random.random() < passed / 20:
                    ends[node] = now + min(random.paretovariate(1.1), 60.0)
                    times[node] = min(1.0 + random.paretovariate(1.5) / 2, 5.0)
            found[node] = times[node] * math.exp(together + abs(random.gauss(0, 0.15)))
        return found

    return slowness


class BusyMachine(World):
    """The run. Its planner shares a step's micro-batches out by the nodes' speeds as planned, and keeps the plan in force unless
    another gains LEAST_GAIN, or what the question says that it must gain."""

    def __init__(self, slowness: Slowness = quiet, lease: float = 10.0) -> None:
        train = {"steps": 1_000_000, "evaluate_every": 0, "global_batch": 2 * MICRO_BATCHES}
        cluster = {"nodes": len(NODES), "stages": "auto", "lease": lease}
        super().__init__(fresh_state(train=train, checkpoint={"every": 0}, cluster=cluster))
        self.slowness = slowness
        device = wire.Device(kind="cpu", name="a cpu", memory_bytes=1 << 33, flops=FLOPS)
        self.join(*NODES, device=device)
        self.settle()

    def plan(self) -> None:
        wanted = self.wanted.pop(0)
        cluster = wanted.cluster()
        flops = {node.id: node.flops for node in cluster.nodes}
        plan = shared_out(flops)
        seconds, reason = predicted(plan, flops) + wanted.overhead, "Another plan is faster."
        if wanted.incumbent is not None and set(wanted.incumbent.nodes) <= flops.keys():
            old = predicted(wanted.incumbent, flops) + wanted.overhead
            if 1 - seconds / old <= max(LEAST_GAIN, wanted.uncertainty):
                plan, seconds, reason = wanted.incumbent, old, "The plan stays."
        self.feed(t.Planned(wanted.number, PlanChosen(plan, reason, seconds, seconds / 2, wanted.lengths[0])))

    def run(self, steps: int) -> None:
        """So many commits, with the changes of plan between them."""
        until = self.state.ledger.training.step + steps
        beat = self.now
        while self.state.ledger.training.step < until:
            if isinstance(self.state.phase, Pausing):
                self.apply()
            if isinstance(self.state.phase, Switching):
                self.settle()
            assert isinstance(self.state.phase, Stepping)
            slow, plan = self.slowness(self.now), self.plan_in_force
            (stage,) = plan.stages
            took = {n: load * WORK / FLOPS * slow[n] for n, load in zip(stage.replicas, stage.loads, strict=True)}
            self.now += max(took.values())
            for node in stage.replicas:
                self.vote(node, compute_seconds=took[node])
            if self.now - beat > self.state.lease / 4:
                beat = self.now
                for node in NODES:
                    self.hear(node, heartbeat=wire.Heartbeat())
                self.feed(t.TimePassed())


def shared_out(flops: Mapping[str, float]) -> Plan:
    """A plan of one stage in which each micro-batch goes to the node that finishes it first."""
    loads = dict.fromkeys(sorted(flops), 0)
    for _ in range(MICRO_BATCHES):
        node = min(loads, key=lambda each: ((loads[each] + 1) / flops[each], each))
        loads[node] += 1
    used = {node: load for node, load in loads.items() if load}
    stages = [Stage((0, LAYERS), tuple(used), ())]
    return from_routes(0, stages, [([node], load) for node, load in used.items()], tuple(flops.keys() - used.keys()))


def predicted(plan: Plan, flops: Mapping[str, float]) -> float:
    (stage,) = plan.stages
    return max(load * WORK / flops[node] for node, load in zip(stage.replicas, stage.loads, strict=True))
