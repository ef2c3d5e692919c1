"""How much faster nodes at home fine-tune together than one alone: ``python -m tests.bench.adapters [--nodes 4]
[--lines 1/1 1/0.2] [--steps 6] [--only-steps] [--json]``.

Equal nodes, each with a slow device, train one published model over emulated home lines (homes.py): once with an adapter of
rank RANK beside it (LoRA), once all of its weights, and each of the two on one node alone. As in time_to_loss.py, a line of
1 Mbit/s stands for one of 100. The adapter has 1.5 % of the model's numbers; one of rank 16 beside a model of 8B has 0.5 %.

- Tokens per second are those of one node alone, times the ratio of the seconds of a step's samples.
- Bytes per step are all that passes between the nodes, with headers.
- A join is timed from the start of the node's process to the first commit of a plan with a part for it: first on a machine with
  empty caches (cold), then again on the same machine (warm). The other nodes train meanwhile.

Each measurement takes some minutes, all of it half an hour.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dtfm.scheduler.model.cluster import Cluster as Network
from tests.bench.homes import MICRO_BATCHES, homes, running
from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster, Event
from tests.published import publish
from tests.wan.unequal import LAYERS, PATIENCE_SECONDS
from tests.wan.wan import COORDINATOR, Wan, WanUnavailable

RANK = 1
TOKENS = 64
"""The length of a sample in the run file."""
_CONFIG = {"hidden_size": 96, "num_hidden_layers": LAYERS - 2, "num_attention_heads": 4, "intermediate_size": 288}


@dataclass(frozen=True, slots=True)
class Steps:
    """``seconds`` of a step's samples, ``bytes_`` between the nodes in a step, and the number of islands."""

    seconds: float
    bytes_: float
    islands: int

    @property
    def tokens_per_second(self) -> float:
        return MICRO_BATCHES * TOKENS / self.seconds


def fine_tunes(text: str, base: Path, *, adapter: bool) -> str:
    """The run file ``text`` for the model in ``base``."""
    before, _, after = text.partition("[model]\n")
    _, _, rest = after.partition("\n")  # the model's config
    table = f"[adapter]\nrank = {RANK}\n" if adapter else ""
    rest = rest.replace("[data]\n", '[data]\ntokenizer = "bytes"\n')
    return f'{before}[model]\npretrained = "{base}"\n{table}{rest}'


def train(network: Network, base: Path, steps: int, *, adapter: bool) -> Steps:
    """The mean over ``steps`` steps. The first step does not count; with rounds, whole rounds after the first one count."""
    change = partial(fine_tunes, base=base, adapter=adapter)
    with tempfile.TemporaryDirectory() as folder, running(network, None, Path(folder), 0, change) as (wan, cluster):
        cluster.wait_for("plan_started", timeout=PATIENCE_SECONDS)
        plan = cluster.of("plan_adopted")[-1]["plan"]
        rounds = plan["rounds"]
        stride = rounds["steps"] // rounds["count"] if rounds["count"] else 1
        counted = -(-steps // stride) * stride
        wait_for_step(cluster, stride)
        before = passed(wan)
        wait_for_step(cluster, stride + counted)
        after = passed(wan)
        taken = [e["seconds"] for e in cluster.of("step_committed") if stride < e["step"] <= stride + counted]
        trained = (stride - 1) / stride if rounds["count"] else 1.0
        islands = len({stage.get("island", 0) for stage in plan["stages"]})
        print(f"{cluster.of('plan_adopted')[-1]['reason']} {taken}", file=sys.stderr, flush=True)
        return Steps(sum(taken) / len(taken) / trained, (after - before) / counted, islands)


def wait_for_step(cluster: Cluster, step: int) -> None:
    cluster.wait_for("step_committed", where=lambda e: e["step"] == step, timeout=PATIENCE_SECONDS * (1 + step / 100))


def passed(wan: Wan) -> int:
    """The bytes that have passed between nodes."""
    return sum(seen.bytes for pair, seen in wan.traffic().items() if COORDINATOR not in pair)


def joins(network: Network, base: Path) -> tuple[float, float]:
    """The seconds of a join, cold and warm, of the network's last node."""
    change = partial(fine_tunes, base=base, adapter=True)
    name = network.ids[-1]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(network, None, Path(folder), 0, change, later=(name,)) as (_, cluster),
    ):
        own = {"XDG_CACHE_HOME": str(Path(folder, "cache-of-newcomer"))}
        wait_for_step(cluster, 2)
        cold = join(cluster, name, own)
        seen = len(cluster.events)
        cluster.nodes[name].send(signal.SIGINT)
        cluster.wait_for("node_left", where=lambda e: bool(e["node"] == name), after=seen, timeout=PATIENCE_SECONDS)
        cluster.wait_for("step_committed", after=len(cluster.events), timeout=PATIENCE_SECONDS)
        return cold, join(cluster, name, own)


def join(cluster: Cluster, name: str, environment: dict[str, str]) -> float:
    seen, began = len(cluster.events), time.time()
    cluster.add(name, environment=environment)

    def has_a_part(adopted: Event) -> bool:
        return any(name in stage["replicas"] for stage in adopted["plan"]["stages"])

    adopted = cluster.wait_for("plan_adopted", where=has_a_part, after=seen, timeout=PATIENCE_SECONDS)
    after = cluster.events.index(adopted)
    committed = cluster.wait_for("step_committed", after=after, timeout=PATIENCE_SECONDS)
    return float(committed["time"] - began)


def rows_of(name: str, one: Steps, several: Steps, nodes: int) -> list[Row]:
    ratio = several.tokens_per_second / one.tokens_per_second
    plan = f"one node, {one.tokens_per_second:,.0f} tokens/s"
    islands = f", {several.islands} islands" if several.islands > 1 else ""
    return [
        Row(f"{name}: {nodes} nodes{islands}", several.tokens_per_second, "tokens/s", plan, ratio),
        Row(f"{name}: between the nodes in a step", several.bytes_ / 1e6, "MB"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--lines", nargs="+", default=["1/1", "1/0.2"], help="Mbit/s down and up")
    parser.add_argument("--steps", type=int, default=6, help="measured steps")
    parser.add_argument("--only-steps", action="store_true", help="leave out the joins")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = publish(Path(folder, "published"), "llama", **_CONFIG)
        ways: dict[str, dict[str, Any]] = {"LoRA": {"adapter": True}, "all weights": {"adapter": False}}
        try:
            alone = {name: train(homes(1, 1, 1), base, options.steps, **way) for name, way in ways.items()}
            for line in options.lines:
                network, rows = homes(options.nodes, *map(float, line.split("/"))), list[Row]()
                measured = {name: train(network, base, options.steps, **way) for name, way in ways.items()}
                for name, several in measured.items():
                    rows += rows_of(name, alone[name], several, options.nodes)
                less = measured["LoRA"].bytes_ / measured["all weights"].bytes_ if options.nodes > 1 else None
                rows.append(Row("LoRA: bytes of a step", measured["LoRA"].bytes_ / 1e6, "MB", "all weights", less))
                if not options.only_steps and options.nodes > 1:
                    cold, warm = joins(network, base)
                    rows.append(Row("LoRA: a join, cold", cold, "s"))
                    rows.append(Row("LoRA: a join, warm", warm, "s", "cold", warm / cold))
                show(f"{options.nodes} nodes, lines of {line} Mbit/s", rows, options.json)
        except WanUnavailable as reason:
            print(f"No network can be emulated here: {reason}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
