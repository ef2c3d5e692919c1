"""What audits cost: ``python -m tests.bench.audits [--pairs 5] [--steps 60] [--json]``.

Four nodes of four owners, two stages of two replicas, train a Llama of 7 million parameters on this machine, in mode "open".
Each round has four runs that differ in ``[trust] audit_rate`` alone:

- "none": 0.
- "default": 0.02, as in any open run.
- "digests": so small that no work is repeated; but votes commit to all tensors that are sent.
- "often": 0.2, so that there are enough steps of each kind in one run.

Figures are medians over the rounds, of ratios within a round. The first steps of a run do not count.

Few steps of "default" are audited. So the cost in the long run is also put together from its parts. One part is the times of
the steps in "often" without an audit, with a part of a share repeated, and with whole shares repeated. The other is how often
each kind is drawn for proven members. (For other members more is repeated.)

Bytes are counted on the machine's loopback, so nothing else may use it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtfm.coordinator.core.trust.draw import odds
from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster, Event
from tests.cluster.leaks import peak_bytes
from tests.cluster.nursery import close_nursery

RATES = {"none": 0.0, "default": 0.02, "digests": 1e-12, "often": 0.2}
NODES = ("a", "b", "c", "d")
TOKENS = 16 * 128
MICRO_BATCHES = 4
"""The micro-batches of each node."""

WARM_UP = 5
"""Steps that do not count, as memory is taken and threads begin; standbys are made in them too."""

RUN = """
name = "audits"
[model]
family = "llama"
config = { hidden_size = 384, num_hidden_layers = 4, num_attention_heads = 6, intermediate_size = 1024 }
[data]
source = "corpus.txt"
sequence_length = 128
[train]
steps = 1000000
global_batch = 16
micro_batch = 2
warmup_steps = 4
evaluate_every = 0
evaluation_samples = 2
[network]
compression = "off"
[cluster]
nodes = 4
stages = [2, 2]
lease = 30.0
[checkpoint]
every = 0
[trust]
mode = "open"
audit_rate = RATE
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one run takes."""

    second: float
    """The mean seconds of a step."""
    steps: Mapping[str, Sequence[float]]
    """The seconds of the steps, by the repeated work: "nothing", a "part" or "whole" shares."""
    cpu: Mapping[str, float]
    """By node, seconds per step."""
    memory: Mapping[str, int]
    """By node, bytes at most."""
    wire: float
    """Of all nodes, in bytes per step."""

    def median(self, kind: str) -> float | None:
        return statistics.median(self.steps[kind]) if self.steps[kind] else None


def run(rate: float, steps: int) -> Taken:
    with tempfile.TemporaryDirectory() as folder:
        text = RUN.replace("RATE", repr(rate))
        with Cluster(Path(folder), text, nodes=NODES, invited=True) as cluster:
            first = cluster.wait_for("step_committed", where=lambda e: e["step"] >= WARM_UP, timeout=300)
            before, wire = cpu_seconds(cluster), loopback_bytes()
            last = cluster.wait_for(
                "step_committed", where=lambda e: e["step"] >= first["step"] + steps, timeout=60 + 20 * steps
            )
            wire, after = loopback_bytes() - wire, cpu_seconds(cluster)
            memory = {name: peak_bytes(process.running.pid) for name, process in cluster.nodes.items()}
            assert cluster.coordinator is not None
            cluster.coordinator.send(signal.SIGINT)
            assert cluster.finish() == 1  # the run is not over
    count = last["step"] - first["step"]
    return Taken(
        (last["time"] - first["time"]) / count,
        by_kind(cluster.events, first["step"], last["step"]),
        {name: (after[name] - before[name]) / count for name in NODES},
        memory,
        wire / count,
    )


def by_kind(events: Sequence[Event], after: int, until: int) -> Mapping[str, Sequence[float]]:
    """Seconds of the steps in between, by the repeated work."""
    kinds: dict[int, str] = {}
    for event in events:
        if event["event"] == "work_audited":
            whole = "addends" in event["errors"] or kinds.get(event["step"]) == "whole"
            kinds[event["step"]] = "whole" if whole else "part"
    taken: dict[str, list[float]] = {"nothing": [], "part": [], "whole": []}
    for event in events:
        if event["event"] == "step_committed" and after < event["step"] <= until:
            taken[kinds.get(event["step"], "nothing")].append(event["seconds"])
    return taken


def cpu_seconds(cluster: Cluster) -> Mapping[str, float]:
    """The CPU seconds of each node's process until now."""
    taken = {}
    for name, process in cluster.nodes.items():
        fields = Path(f"/proc/{process.running.pid}/stat").read_text().rpartition(")")[2].split()
        taken[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return taken


def loopback_bytes() -> int:
    """The bytes that the loopback interface of this network namespace has carried."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[0])
    raise OSError("there is no loopback interface")


def rows(rounds: Sequence[Mapping[str, Taken]]) -> list[Row]:
    def middle(of: Callable[[Mapping[str, Taken]], float | None]) -> float:
        found = [value for each in rounds if (value := of(each)) is not None]
        return statistics.median(found) if found else float("nan")

    def compared(measure: str, unit: str, of: Callable[[Taken], float], *names: str) -> list[Row]:
        result = [Row(f"{measure}: none", middle(lambda r: of(r["none"])), unit)]
        for name in names:
            value = middle(lambda r, name=name: of(r[name]))  # type: ignore[misc]
            ratio = middle(lambda r, name=name: of(r[name]) / of(r["none"]))  # type: ignore[misc]
            result.append(Row(f"{measure}: {name}", value, unit, "none", ratio))
        return result

    def extra(kind: str) -> float:
        """The extra time of a step with repeated work of this kind, over a step without, in the same run."""

        def of(each: Mapping[str, Taken]) -> float | None:
            audited, others = each["often"].median(kind), each["often"].median("nothing")
            return audited / others - 1 if audited and others else None

        return middle(of)

    tokens = compared("tokens/s", "tokens/s", lambda t: TOKENS / t.second, "default", "digests")
    drawn = odds(RATES["default"], MICRO_BATCHES)
    audits = drawn.whole * extra("whole") + drawn.part * extra("part")
    digests = tokens[-1].ratio or float("nan")
    parts = [
        Row("step with a part repeated", 1 + extra("part"), "", "step without", 1 + extra("part")),
        Row("step with whole shares repeated", 1 + extra("whole"), "", "step without", 1 + extra("whole")),
        Row(
            "tokens/s at the default, made up of its parts", digests / (1 + audits), "", "none", digests / (1 + audits)
        ),
    ]
    worst = [
        min(r["default"].second / r["none"].second for r in rounds),
        max(r["default"].second / r["none"].second for r in rounds),
    ]
    return [
        *tokens,
        *(
            Row(f"seconds per step, default over none, {n} round", v, "")
            for n, v in zip(("best", "worst"), worst, strict=True)
        ),
        *parts,
        *compared("CPU of all nodes", "s/step", lambda t: sum(t.cpu.values()), "default", "digests", "often"),
        *compared(
            "peak memory of the largest node", "bytes", lambda t: max(t.memory.values()), "default", "digests", "often"
        ),
        *compared("bytes over loopback", "bytes/step", lambda t: t.wire, "default", "digests", "often"),
        *(
            Row(f"CPU of {node}: {name}", middle(lambda r, name=name, node=node: r[name].cpu[node]), "s/step")  # type: ignore[misc]
            for node in NODES
            for name in ("none", "default")
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="rounds")
    parser.add_argument("--steps", type=int, default=60, help="of each run, after the first few")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    try:
        rounds = [{name: run(rate, arguments.steps) for name, rate in RATES.items()} for _ in range(arguments.pairs)]
    finally:
        close_nursery()
    show(f"What audits cost, {arguments.pairs} rounds of {arguments.steps} steps", rows(rounds), arguments.json)


if __name__ == "__main__":
    main()
