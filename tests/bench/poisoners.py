"""What a poisoner among strangers does to a run, and how soon it is found: ``python -m tests.bench.poisoners [--twists A B]
[--seeds 3] [--steps 60] [--rounds N] [--colluding] [--believed] [--json]``.

Six nodes of six owners, two stages of three replicas, on this machine, in mode "open" with the audits of its default. An
evaluation follows each step, so that liars in evaluations have as many occasions as the others. One node is twisted
(tests/attacks/twisted.py) from its first step on. Each run is compared with an honest run of the same seed, plan and steps.
Compared are the held-out loss after the last step, and the step after which the poisoner was quarantined. A run that does not
finish has an infinite loss.

- ``--rate``: another share of the work is audited.
- ``--colluding``: two of the six lie in the same way, and find each other's work right in audits. The output is how many runs
  they lost: nobody else is quarantined, and they have no part in the last step. It is given for first plans that had them on
  one stage, as with odd seeds, and on two.
- ``--believed``: one of the honest nodes is believed, by turns.
- ``--rounds N``: each of the six nodes is an island, and the islands exchange their changes every N steps.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.attacks.twisted import FRIENDS
from tests.bench.rows import Row, show
from tests.cluster.launch import Cluster
from tests.cluster.nursery import close_nursery
from tests.cluster.runs import run_file

BEFORE, AFTER = "abcde", "vwxyz"
"""Names of honest nodes, in the alphabet before the poisoners' and after. The planner gives the stages to equal nodes in the
order of their names."""
POISONER, ACCOMPLICE = FRIENDS
TWISTS = (
    "flips",
    "exaggerates",
    "adds_noise",
    "adds_too_much",
    "biased_forward",
    "sends_zeros",
    "repeats",
    "mislabels",
    "flatters",
    "lies_in_evaluations",
    "misevaluates",
    "huge_norm",
)
FIRST_STAGE = ("biased_forward", "sends_zeros", "repeats", "misevaluates", "noisy")
"""Lies that only a node can tell that passes activations on. The other lies are the last stage's."""
STAGES = [3, 3]
ALONE = ("huge_norm",)
"""A lie of a node that is alone in its stage, which is the last one then. Of equal nodes the planner puts the second there."""
ONE_ALONE = [5, 1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run."""

    held_out: float
    found: int | None
    """The step after which the last poisoner was quarantined. None: not all were."""
    accused: tuple[str, ...]
    """Other quarantined nodes."""
    at_work: tuple[str, ...]
    """The poisoners that had a part in the last step."""
    seconds: float
    together: bool
    """The first plan had the poisoners on one stage."""
    placed: bool
    """The first plan had the one poisoner on the stage meant for it. Some lies can be told only there."""


def train(
    twist: str,
    seed: int,
    steps: int,
    rate: str,
    poisoners: Sequence[str] = (POISONER,),
    *,
    rounds: int = 0,
    believed: bool = False,
) -> Outcome:
    """One run. An empty ``twist``: all are honest. Two poisoners are on one stage if the seed is odd. ``believed``: one honest
    node is believed."""

    def place(name: str, command: list[str]) -> list[str]:
        if name not in poisoners or not twist:
            return command
        at = command.index("dtfm.node.cli")
        lies = twist if len(poisoners) == 1 else f"{twist}+covers"
        return [*command[:at], "tests.attacks.twisted", lies, *command[at + 1 :]]

    stages = ONE_ALONE if twist in ALONE else STAGES
    text = run_file(stages=stages, steps=steps, precision="fp32").replace("seed = 7", f"seed = {seed}")
    text = text.replace("[train]\n", "[train]\nevaluate_every = 1\n")
    text += f'[trust]\nmode = "open"\naudit_rate = {rate}\n'
    if rounds:
        text = text.replace(f"stages = {stages}\n", "").replace("[train]\n", f"[train]\nrounds = {rounds}\n")
    coordinator = "tests.cluster.drawn" if rounds else "tests.cluster.alike" if twist in ALONE else ""
    with tempfile.TemporaryDirectory() as folder:
        first = twist in FIRST_STAGE if len(poisoners) == 1 else seed % 2 == 1
        others = BEFORE[0] + AFTER if twist in ALONE else AFTER if first else BEFORE
        names = (*others[: sum(STAGES) - len(poisoners)], *poisoners)
        invited = set(names) - ({names[seed // 2 % (sum(STAGES) - len(poisoners))]} if believed else set[str]())
        with Cluster(
            Path(folder), text, coordinator=coordinator, place=place, nodes=names, invited=invited, liars=True
        ) as cluster:
            try:
                finished = cluster.finish(timeout=600) == 0
            except subprocess.TimeoutExpired:
                finished = False
            quarantined, trained = dict[str, int](), 0
            for event in cluster.events:
                trained = max(trained, event["step"]) if event["event"] == "step_committed" else trained
                if event["event"] == "node_quarantined":  # when what it did is undone already
                    quarantined[event["node"]] = trained
            stages = cluster.of("plan_adopted")[0]["plan"]["stages"]
            return Outcome(
                cluster.of("evaluated")[-1]["loss"] if finished else math.inf,
                max(quarantined[name] for name in poisoners) if quarantined.keys() >= set(poisoners) else None,
                tuple(sorted(quarantined.keys() - set(poisoners))),
                tuple(name for name in poisoners if name in cluster.of("step_committed")[-1]["compute_seconds"]),
                statistics.median(event["seconds"] for event in cluster.of("step_committed")),
                any(set(stage["replicas"]) >= set(poisoners) for stage in stages),
                len(poisoners) > 1 or poisoners[0] in stages[0 if first else -1]["replicas"],
            )


def rows_of(twist: str, poisoned: list[Outcome], honest: list[Outcome]) -> list[Row]:
    ratios = [one.held_out / other.held_out for one, other in zip(poisoned, honest, strict=True)]
    found = sorted(outcome.found for outcome in poisoned if outcome.found is not None)
    placed = sum(outcome.placed for outcome in poisoned)
    rows = [
        Row(
            f"{twist}: held-out loss, median",
            statistics.median(o.held_out for o in poisoned),
            "nats",
            "honest",
            statistics.median(ratios),
        ),
        Row(f"{twist}: held-out loss, worst", max(o.held_out for o in poisoned), "nats", "honest", max(ratios)),
        Row(f"{twist}: runs with it on the stage meant for it", placed, "runs"),
        Row(f"{twist}: runs that found it", len(found), "runs", "all", len(found) / len(poisoned)),
    ]
    if found:
        rows.append(Row(f"{twist}: steps until it was found, median", statistics.median(found), "steps"))
        rows.append(Row(f"{twist}: steps until it was found, worst", found[-1], "steps"))
    accused = [name for outcome in poisoned for name in outcome.accused]
    return [*rows, Row(f"{twist}: honest nodes that were quarantined", len(accused), "nodes")]


def who_lost(twist: str, poisoned: list[Outcome]) -> list[Row]:
    """The runs that two colluders lost, by whether the first plan had them on one stage."""
    rows = []
    for together, where in ((True, "on one stage"), (False, "on two stages")):
        runs = [outcome for outcome in poisoned if outcome.together == together]
        lost = sum(not outcome.at_work and not outcome.accused for outcome in runs)
        if runs:
            rows.append(Row(f"{twist}, two {where}: they lost", lost, "runs", "all", lost / len(runs)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--twists", nargs="*", default=TWISTS, help="what the poisoner does, names of twisted.py")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="make each node an island, with an exchange after this many steps; 0: no islands",
    )
    parser.add_argument("--rate", default='"auto"', help="[trust] audit_rate")
    parser.add_argument("--colluding", action="store_true", help="two poisoners, who lie for each other")
    parser.add_argument("--believed", action="store_true", help="one of the honest nodes is believed")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    arguments = parser.parse_args()
    poisoners = FRIENDS if arguments.colluding else (POISONER,)
    try:
        seeds = range(1, arguments.seeds + 1)
        run = partial(
            train,
            steps=arguments.steps,
            rate=arguments.rate,
            poisoners=poisoners,
            rounds=arguments.rounds,
            believed=arguments.believed,
        )
        honest = [run("", seed) for seed in seeds]
        print(f"honest runs: {[round(outcome.held_out, 4) for outcome in honest]}", file=sys.stderr)
        rows = [Row("honest: nodes that were quarantined", sum(len(o.accused) for o in honest), "nodes")]
        for twist in arguments.twists:
            poisoned = []
            for seed in seeds:
                poisoned.append(run(twist, seed))
                print(f"{twist}, seed {seed}: {poisoned[-1]}", file=sys.stderr, flush=True)
            rows += rows_of(twist, poisoned, honest)
            rows += who_lost(twist, poisoned) if arguments.colluding else []
        who = "Two colluding poisoners" if arguments.colluding else "One poisoner"
        show(f"{who} of six nodes, {arguments.steps} steps", rows, arguments.json)
    finally:
        close_nursery()


if __name__ == "__main__":
    main()
