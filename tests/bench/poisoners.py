"""What a poisoner among strangers does to a run, and how soon it is found: ``python -m tests.bench.poisoners [--twists A B]
[--seeds 3] [--steps 60] [--json]``.

Six nodes of six owners, two stages of three replicas, on this machine, in mode "open" with the audits of its default. One node is
twisted (tests/attacks/twisted.py) from its first step on. Each run is compared with an honest one of the same seed, plan and
steps: held-out loss after the last step, and the step after which the poisoner was quarantined. With ``--rate``, another share of
the work is audited.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dtfm.node.host.rows import Row, show
from tests.attacks.twisted import LIES
from tests.cluster.launch import Cluster
from tests.cluster.nursery import close_nursery
from tests.cluster.runs import run_file

HONEST = ("a", "b", "c", "d", "e")
POISONER = "poisoner"
STAGES = [3, 3]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``found``: the step after which the poisoner was quarantined; None: it was not. ``accused``: who else was."""

    held_out: float
    found: int | None
    accused: tuple[str, ...]
    seconds: float


def train(twist: str, seed: int, steps: int, rate: str) -> Outcome:
    """One run; an empty ``twist``: all are honest."""

    def place(name: str, command: list[str]) -> list[str]:
        if name != POISONER or not twist:
            return command
        at = command.index("dtfm.node.cli")
        return [*command[:at], "tests.attacks.twisted", twist, *command[at + 1 :]]

    text = run_file(stages=STAGES, steps=steps, precision="fp32").replace("seed = 7", f"seed = {seed}")
    text += f'[trust]\nmode = "open"\naudit_rate = {rate}\n'
    with tempfile.TemporaryDirectory() as folder:
        names = (*HONEST, POISONER)
        with Cluster(Path(folder), text, place=place, nodes=names, invited=True, liars=True) as cluster:
            code = cluster.finish(timeout=600)
            if code != 0:
                raise RuntimeError(
                    f"the run with {twist or 'nobody'} twisted, seed {seed}, ended with exit code {code}"
                )
            quarantined = {event["node"]: event["step"] for event in cluster.of("node_quarantined")}
            return Outcome(
                cluster.of("evaluated")[-1]["loss"],
                quarantined.get(POISONER),
                tuple(sorted(quarantined.keys() - {POISONER})),
                statistics.median(event["seconds"] for event in cluster.of("step_committed")),
            )


def rows_of(twist: str, poisoned: list[Outcome], honest: list[Outcome]) -> list[Row]:
    ratios = [one.held_out / other.held_out for one, other in zip(poisoned, honest, strict=True)]
    found = sorted(outcome.found for outcome in poisoned if outcome.found is not None)
    rows = [
        Row(
            f"{twist}: held-out loss, median",
            statistics.median(o.held_out for o in poisoned),
            "nats",
            "honest",
            statistics.median(ratios),
        ),
        Row(f"{twist}: held-out loss, worst", max(o.held_out for o in poisoned), "nats", "honest", max(ratios)),
        Row(f"{twist}: runs in which it was found", len(found), "runs", "all", len(found) / len(poisoned)),
    ]
    if found:
        rows.append(Row(f"{twist}: steps until it was found, median", statistics.median(found), "steps"))
        rows.append(Row(f"{twist}: steps until it was found, worst", found[-1], "steps"))
    accused = [name for outcome in poisoned for name in outcome.accused]
    return [*rows, Row(f"{twist}: honest nodes that were quarantined", len(accused), "nodes")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--twists", nargs="*", default=sorted(LIES), help="what the poisoner does; default: everything")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", default='"auto"', help="[trust] audit_rate")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    try:
        seeds = range(1, arguments.seeds + 1)
        honest = [train("", seed, arguments.steps, arguments.rate) for seed in seeds]
        print(f"honest runs: {[round(outcome.held_out, 4) for outcome in honest]}", file=sys.stderr)
        rows = [Row("honest: nodes that were quarantined", sum(len(o.accused) for o in honest), "nodes")]
        for twist in arguments.twists:
            poisoned = []
            for seed in seeds:
                poisoned.append(train(twist, seed, arguments.steps, arguments.rate))
                print(f"{twist}, seed {seed}: {poisoned[-1]}", file=sys.stderr)
            rows += rows_of(twist, poisoned, honest)
        show(f"One poisoner of six nodes, {arguments.steps} steps", rows, arguments.json)
    finally:
        close_nursery()


if __name__ == "__main__":
    main()
