"""How soon several nodes have a loss, each way: ``python -m tests.bench.time_to_loss [--nodes 4] [--lines 1/1 1/0.2 10/10
worldwide] [--rounds 10 30 100] [--steps 200] [--seeds 2] [--hivemind PYTHON] [--deaths] [--picture FILE] [--keep FILE]
[--json]``.

A value is the time until a model has the held-out loss that one node alone has after --steps steps: the seconds of a step's
samples, times the number of steps. The seconds are measured over an emulated network with slow devices (homes.py). The steps
are counted without a network (islands.py), in the mean over seeds, with a learning rate that falls like a cosine over twice
--steps. With "auto" the run itself chooses rounds, or none. A line is a home's, in Mbit/s down and up, or "worldwide": the
paper's regions, with a hundredth of its bandwidths.

Ours is compared with ways that give each node the whole model. Their seconds are the computing of one node alone, divided by
the nodes, and a measured all-reduce:

- over Gloo in float32, after each step, like torch's DistributedDataParallel, but not overlapped.
- over Gloo once in a round, as in torchft's DiLoCo, with its outer rate of 0.7 and momentum of 0.9.
- with hivemind's averager in 8 bits, once in a round (reduce.py says how to install it).

Rounds longer than LONGEST steps are not measured over the network. Their seconds follow from the seconds of the next shorter
ones, with as many islands.

With --deaths one run is real from its beginning to that loss, on the first line, with rounds of DEATHS_IN steps. One node is
killed in the middle of each round, and started again immediately.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from dtfm.node.data.load import load_data
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.formats.paper import Network as Paper
from dtfm.scheduler.model.cluster import Cluster as Network
from tests.bench import reduce
from tests.bench.homes import CONSTANT, MICRO_BATCHES, Measured, homes, measure, running
from tests.bench.islands import Way, held_out, steps_to
from tests.bench.reduce_end import BUCKETS
from tests.bench.rows import Row, show
from tests.cluster.launch import Event
from tests.cluster.plain import CPU, whole_model
from tests.cluster.runs import write_corpus
from tests.wan.networks import eight_nodes
from tests.wan.unequal import FASTEST, LEASE_SHARED, run_file
from tests.wan.wan import Wan, WanUnavailable

AS_MANY_STEPS = 2
"""Each way gets at most this many times the steps of one node alone."""
LONGEST = 30
DEATHS_IN = 30
MOST_DEATHS = 20
WORLDWIDE = "worldwide"
SLOWER = 100
"""The divisor of the paper's bandwidths: homes of 1 Mbit/s stand for homes of 100."""

ATTEMPTS = 3
LARGEST_ERROR = 0.1
"""The largest error of averages in 8 bits. If hivemind fails, each peer keeps its own tensors."""

COLOURS = {
    "one": "black",
    "without": "green",
    "rounds": "red",
    '"auto"': "purple",
    "Dist": "brown",
    "DiLoCo": "blue",
    "hivemind": "orange",
}
"""Colours in the picture, by the beginning of a way's name."""
DASHES = ("-", "--", ":")
"""Dashes in the picture, by the length of rounds."""

Losses = Mapping[Way, Sequence[Mapping[int, float]]]
"""By way and seed, the held-out losses by step."""


@dataclass(frozen=True, slots=True)
class Timed:
    """``seconds`` of a step's samples, this way. ``predicted`` by the scheduler, if it was asked."""

    name: str
    way: Way
    seconds: float
    predicted: float = 0.0


def network(line: str, count: int) -> Network:
    if line != WORLDWIDE:
        down, up = map(float, line.split("/"))
        return homes(count, down, up)
    scaled, chosen = eight_nodes(Paper.WORLDWIDE), [*range(0, 8, 8 // count)][:count]
    eight, index = scaled.cluster, np.ix_(chosen, chosen)
    nodes = tuple(replace(eight.nodes[place], id=f"n{number}", flops=FASTEST) for number, place in enumerate(chosen))
    return Network(nodes, eight.latency[index], eight.bandwidth[index] * scaled.divisor / SLOWER)


def ours(of: Network, length: int | None) -> dict[str, Any]:
    """The result of `measure` as JSON can hold it."""
    with tempfile.TemporaryDirectory() as folder:
        return asdict(measure(of, length, Path(folder)))


def our_way(one: Measured, length: int) -> Timed:
    """Our way with rounds of this ``length``."""
    name = f"rounds = {length}" if length else "without rounds"
    if one.islands == 1:
        return Timed(name, Way(), one.seconds, one.predicted)
    return Timed(f"{name}, {one.islands} islands", Way(one.islands, length, "i4b64"), one.seconds, one.predicted)


def timed(
    line: str, of: Network, alone: Timed, lengths: Sequence[int], hivemind: str, keep: Path | None
) -> list[Timed]:
    """Times the ways on the line, after ``alone``. ``hivemind``: an interpreter that has it; empty: hivemind is left out."""
    nodes = len(of.nodes)
    found, measured = [alone], 0
    for length in (0, *lengths):
        if length <= LONGEST or not measured:
            one, measured = (
                Measured(**kept(keep, f"{line}, rounds = {length}", partial(ours, of, length))),
                length,
            )
            found.append(our_way(one, length))
        else:
            seconds = one.seconds - one.exchange / measured + one.exchange / length
            derived = our_way(replace(one, seconds=seconds, predicted=0.0), length)
            found.append(replace(derived, name=f"{derived.name}, derived"))
    chosen = Measured(**kept(keep, f"{line}, rounds chosen", partial(ours, of, None)))
    by_itself = our_way(chosen, chosen.length)
    found.append(replace(by_itself, name=f'"auto": {by_itself.name}'))
    computing = alone.seconds / nodes
    exchange = kept(keep, f"{line}, Gloo", partial(reducing, of))
    found.append(Timed("DistributedDataParallel", Way(), computing + exchange))
    for length in lengths:
        way = Way(nodes, length, "off", 0.7, 0.9)
        found.append(Timed(f"DiLoCo every {length} steps", way, computing + exchange / length))
    if hivemind and (exchange := kept(keep, f"{line}, hivemind", partial(averaging, of, hivemind))):
        for length in lengths:
            way = Way(nodes, length, "i8b256")
            found.append(Timed(f"hivemind every {length} steps", way, computing + exchange / length))
    return found


def read(file: Path | None) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}
    return known


def kept(file: Path | None, name: str, found: Callable[[], Any]) -> Any:
    """An earlier result of this name from the JSON ``file``. If there is none, computes the result now and keeps it there."""
    if name in (before := read(file)):
        return before[name]
    print(f"{name} ...", file=sys.stderr, flush=True)
    value = found()
    if file:
        file.write_text(json.dumps(read(file) | {name: value}, indent=1))
    return value


def reducing(of: Network) -> float:
    """The seconds of summing with Gloo."""
    with Wan(of) as wan:
        return reduce.measure(wan, sys.executable, "gloo", 1, "")[0]


def averaging(of: Network, hivemind: str) -> float:
    """The seconds of averaging with hivemind; 0 if all ATTEMPTS fail."""
    for _ in range(ATTEMPTS):
        try:
            with Wan(of) as wan:
                seconds, error = reduce.measure(wan, hivemind, "hivemind-8bit", 1, "")
        except RuntimeError as problem:
            print(f"hivemind: {problem}", file=sys.stderr)
        else:
            if error < LARGEST_ERROR:
                return seconds
            print(f"hivemind: its averages are wrong by {error}", file=sys.stderr)
    return 0.0


def losses_of(ways: Iterable[Way], run: Path, seeds: int, steps: int, keep: Path | None) -> Losses:
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:

        def begun(way: Way, seed: int) -> Future[dict[int, float]]:
            return pool.submit(held_out, way, run, seed, 0, -(-steps // way.every) * way.every, CPU)

        numbers, known = range(1, seeds + 1), read(keep)
        losing = {way: [begun(way, seed) for seed in numbers] for way in ways if str(way) not in known}

        def results(way: Way) -> list[dict[str, float]]:
            return [{str(step): loss for step, loss in of.result().items()} for of in losing[way]]

        found = {way: kept(keep, str(way), partial(results, way)) for way in ways}
    return {way: [{int(step): loss for step, loss in of.items()} for of in its] for way, its in found.items()}


def with_deaths(of: Network, length: int, loss: float) -> tuple[float, int]:
    """Trains until an evaluation shows ``loss``, or for MOST_DEATHS, and kills another node in the middle of each round.
    Returns the seconds since the first plan, and the number of deaths."""
    with tempfile.TemporaryDirectory() as folder, running(of, length, Path(folder), length + 1) as (_, cluster):
        began = cluster.wait_for("plan_adopted", timeout=300)["time"]
        deaths = 0
        while True:
            seen, name, deaths = len(cluster.events), of.ids[deaths % len(of.ids)], deaths + 1
            cluster.wait_for("step_committed", where=partial(is_midway, length + 1), after=seen, timeout=900)
            cluster.nodes[name].send(signal.SIGKILL)
            cluster.wait_for("node_left", where=partial(is_of, name), after=seen)
            cluster.add(name)
            evaluated = cluster.wait_for("evaluated", after=seen, timeout=900)
            took = evaluated["time"] - began
            back = [event["reason"] for event in cluster.events[seen:] if event["event"] == "rolled_back"]
            print(f"step {evaluated['step']}, {took:.0f} s: {evaluated['loss']}, {back}", file=sys.stderr, flush=True)
            if evaluated["loss"] <= loss or deaths == MOST_DEATHS:
                return took, deaths


def is_midway(stride: int, committed: Event) -> bool:
    return bool(committed["step"] % stride == stride // 2)


def is_of(node: str, event: Event) -> bool:
    return bool(event["node"] == node)


def rows_of(ways: Sequence[Timed], losses: Losses, steps: int) -> list[Row]:
    target = [of_seed[steps] for of_seed in losses[Way()]]
    rows = list[Row]()
    alone = ways[0].seconds * steps
    for each in ways:
        of_plan = (f"{each.predicted:.3g} s predicted", each.seconds / each.predicted) if each.predicted else ()
        rows.append(Row(f"{each.name}: a step's samples", each.seconds, "s", *of_plan))
        pairs = list(zip(losses[each.way], target, strict=True))
        if all(min(of_seed.values()) <= loss for of_seed, loss in pairs):
            needed = statistics.mean(steps_to(loss, of_seed) for of_seed, loss in pairs)
            rows.append(Row(f"{each.name}: steps to the loss", needed, "steps", "alone", needed / steps))
            seconds = needed * each.seconds
            rows.append(Row(f"{each.name}: time to the loss", seconds, "s", "alone", seconds / alone))
        else:
            rows.append(Row(f"{each.name}: steps to the loss, more than", AS_MANY_STEPS * steps, "steps"))
    return rows


def draw(lines: Mapping[str, Sequence[Timed]], losses: Losses, steps: int, file: str) -> None:
    """A panel for each line: the held-out loss over the time, up to 1.2 times the time of one node alone."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")  # pip install matplotlib

    lengths = sorted({each.way.every for ways in lines.values() for each in ways} - {1})
    figure, panels = pyplot.subplots(1, len(lines), figsize=(4.2 * len(lines), 3.6), sharey=True, squeeze=False)
    for panel, (line, ways) in zip(panels[0], lines.items(), strict=True):
        most = 1.2 * ways[0].seconds * steps
        for each in ways:
            by_step = {step: statistics.mean(of[step] for of in losses[each.way]) for step in losses[each.way][0]}
            shown = {step * each.seconds: loss for step, loss in by_step.items() if step * each.seconds <= most}
            colour = next(colour for begins, colour in COLOURS.items() if each.name.startswith(begins))
            dashes = DASHES[lengths.index(each.way.every) % len(DASHES)] if each.way.every in lengths else "-"
            panel.plot(*zip(*shown.items(), strict=True) if shown else ((), ()), dashes, color=colour, label=each.name)
        panel.axhline(statistics.mean(of[steps] for of in losses[Way()]), color="grey", linewidth=0.5)
        panel.set(title=line, xlabel="seconds", xlim=(0, most))
        panel.legend(fontsize=6)
    panels[0][0].set_ylabel("held-out loss")
    figure.tight_layout()
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--lines", nargs="+", default=["1/1", "1/0.2", "10/10", WORLDWIDE], help="Mbit/s down and up")
    parser.add_argument("--rounds", type=int, nargs="+", default=[10, 30, 100], help="steps between two exchanges")
    parser.add_argument("--steps", type=int, default=200, help="of one node alone")
    parser.add_argument("--seeds", type=int, default=2, help="the number of runs of each way, for the loss")
    parser.add_argument("--hivemind", default="", metavar="PYTHON", help="an interpreter that can import hivemind")
    parser.add_argument("--deaths", action="store_true", help="also a real run, with a death in each round")
    parser.add_argument("--picture", default="", metavar="FILE", help="draw the curves (needs matplotlib)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep results here, and reuse them")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    options.rounds.sort()
    if WORLDWIDE in options.lines and options.nodes > 8:
        parser.error(f"--nodes {options.nodes}: at most 8 with {WORLDWIDE}")
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        text = run_file(MICRO_BATCHES, LEASE_SHARED).replace("corpus.txt", f"{folder}/corpus.txt")
        path = Path(folder, "run.toml")
        path.write_text(text.replace("evaluation_samples = 1\n", CONSTANT))
        run = read_run_file(path).message("bench")
        elements = sum(parameter.numel() for parameter in whole_model(run, load_data(run), ()).parameters())
        os.environ["REDUCE_ELEMENTS"] = str(-(-elements // BUCKETS))
        networks = {line: network(line, options.nodes) for line in options.lines}
        try:
            first = network(options.lines[0], 1)
            one = Measured(**kept(options.keep, "one node alone", partial(ours, first, 0)))
            alone = Timed("one node alone", Way(), one.seconds, one.predicted)
            lines = {
                line: timed(line, of, alone, options.rounds, options.hivemind, options.keep)
                for line, of in networks.items()
            }
        except WanUnavailable as reason:
            print(f"No network can be emulated here: {reason}", file=sys.stderr)
            return 2
        trained = dict.fromkeys(each.way for ways in lines.values() for each in ways)
        losses = losses_of(trained, path, options.seeds, AS_MANY_STEPS * options.steps, options.keep)
    for line, ways in lines.items():
        title = f"{options.nodes} nodes, lines {line}, to the loss of one node after {options.steps} steps"
        show(title, rows_of(ways, losses, options.steps), options.json)
    if options.picture:
        draw(lines, losses, options.steps, options.picture)
    if options.deaths:
        loss = losses[Way()][0][options.steps]
        took, deaths = with_deaths(networks[options.lines[0]], DEATHS_IN, loss)
        name = f"rounds = {DEATHS_IN}, {deaths} deaths: time to the loss"
        row = Row(name, took, "s", "alone", took / (alone.seconds * options.steps))
        show("For real", [row], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
