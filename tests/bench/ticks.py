"""What a tick of the coordinator costs with 1,000 strangers who are audited: ``python -m tests.bench.ticks [--nodes 1000]``.

A scripted coordinator without processes: joins, whole steps with votes and audits, then the death of a node in a step, and the
steps after it. Each row is over the ticks of one part of that; a tick is the core alone, without the log's disk.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.tick import tick
from dtfm.node.host.rows import Row, show
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator import script
from tests.coordinator.script import LAYERS, LONG, World, fresh_state

STEPS = 5


def a_stage_per_layer(nodes: Iterable[str]) -> Plan:
    """Each node sends one micro-batch to one of the next stage."""
    names = sorted(nodes)
    each = len(names) // LAYERS
    groups = [names[i * each :] if i == LAYERS - 1 else names[i * each : (i + 1) * each] for i in range(LAYERS)]
    stages = [Stage((layer, layer + 1), tuple(group), ()) for layer, group in enumerate(groups)]
    longest = max(map(len, groups))
    return from_routes(0, stages, [([group[i % len(group)] for group in groups], 1) for i in range(longest)])


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    took: dict[str, list[tuple[float, str]]] = defaultdict(list)
    part = ["joining"]

    def timed(state: State, event: t.Input, now: float) -> tuple[State, t.Ready]:
        start = time.perf_counter()
        result = tick(state, event, now)
        kind = event.message.WhichOneof("message") if isinstance(event, t.Heard | t.Greeted) else type(event).__name__
        took[part[0]].append((time.perf_counter() - start, str(kind)))
        return result

    script.tick = timed  # type: ignore[attr-defined]
    names = [f"node-{number:04d}" for number in range(arguments.nodes)]
    micro_batches = arguments.nodes // LAYERS
    trust = {"mode": "open", "audit_rate": 0.05}
    cluster = {"nodes": arguments.nodes, "stages": LAYERS}
    train = {**LONG["train"], "micro_batch": 2, "global_batch": 2 * micro_batches}
    world = World(fresh_state(**{**LONG, "train": train}, trust=trust, cluster=cluster), a_stage_per_layer)
    for name in names:
        world.belong_together(name, key=f"key of {name}")
    for name in names:
        world.prepare(name, script.prepared(micro_batches))
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
