"""What a tick of the coordinator costs with 1,000 audited strangers: ``python -m tests.bench.ticks [--nodes 1000]``.

A scripted coordinator without processes: joins, whole steps with votes and audits, then the death of a node in a step, and the
steps after it. Each row is over the ticks of one part of that; a tick is the core alone, without the log's disk. Seconds are of
this thread's CPU, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.tick import tick
from dtfm.protos import control_pb2 as wire, plan_pb2
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.bench.rows import Row, show
from tests.coordinator import script
from tests.coordinator.script import LONG, World, fresh_state

STEPS = 5


def stages_of(nodes: Iterable[str], replicas: int) -> Plan:
    """A layer for each stage, and a micro-batch for each replica."""
    names = sorted(nodes)
    groups = [names[i : i + replicas] for i in range(0, len(names), replicas)]
    stages = [Stage((layer, layer + 1), tuple(group), ()) for layer, group in enumerate(groups)]
    return from_routes(0, stages, [([group[i % len(group)] for group in groups], 1) for i in range(replicas)])


def described(layers: int) -> wire.NodeMessage:
    """Each node's description of the model."""
    layer = plan_pb2.Layer(name="layer", forward_flops=1e9, parameter_bytes=1 << 20, activation_bytes=1 << 16)
    return script.prepared(layers=[layer] * layers, buckets=layers)


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=20, help="the number of replicas of each stage")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    took: dict[str, list[tuple[float, str]]] = defaultdict(list)
    part = ["joining"]

    def timed(state: State, event: t.Input, now: float) -> tuple[State, t.Ready]:
        start = time.thread_time()
        result = tick(state, event, now)
        kind = event.message.WhichOneof("message") if isinstance(event, t.Heard | t.Greeted) else type(event).__name__
        took[part[0]].append((time.thread_time() - start, str(kind)))
        return result

    script.tick = timed  # type: ignore[attr-defined]
    names = [f"node-{number:04d}" for number in range(arguments.nodes)]
    replicas, stages = arguments.replicas, -(-arguments.nodes // arguments.replicas)
    trust = {"mode": "open", "audit_rate": 0.05}
    cluster = {"nodes": arguments.nodes, "stages": stages}
    train = {**LONG["train"], "micro_batch": 2, "global_batch": 2 * replicas}
    world = World(
        fresh_state(**{**LONG, "train": train}, trust=trust, cluster=cluster), partial(stages_of, replicas=replicas)
    )
    for name in names:
        world.belong_together(name, key=f"key of {name}")
    for name in names:
        world.prepare(name, described(stages))
        world.report_links(name)
    part[0] = "ready"
    world.wait(world.state.lease, beating=())
    world.settle()
    part[0] = "steps"
    for _ in range(STEPS):
        world.step()
    assert world.state.ledger.training.step == STEPS
    part[0] = "death"
    world.lose(names[3])
    world.settle()
    part[0] = "steps after it"
    for _ in range(STEPS):
        world.step()
    rows = []
    for name, ticks in took.items():
        ordered = sorted(ticks)
        longest, kind = ordered[-1]
        rows += [
            Row(f"{name}, {len(ordered)} ticks: median", 1e3 * ordered[len(ordered) // 2][0], "ms"),
            Row(f"{name}: 99th percentile", 1e3 * ordered[int(0.99 * (len(ordered) - 1))][0], "ms"),
            Row(f"{name}: longest, a {kind}", 1e3 * longest, "ms"),
        ]
    show(f"A tick with {arguments.nodes} nodes", rows, arguments.json)


if __name__ == "__main__":
    main()
