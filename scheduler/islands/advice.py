"""How much sooner a run that exchanges gradients in every step would come to the same loss with rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from dtfm.scheduler.islands.layout import QUICK, lay_out, tokens_needed
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.rounds import Rounds
from dtfm.scheduler.model.workload import Workload

LENGTHS = 10, 30, 100
"""For these it was measured how many more tokens islands need (tokens_needed)."""

MARGIN = 0.1
"""The estimates are rough: what gains less is not advised."""

SECONDS = 3.0
"""For each length."""


@dataclass(frozen=True, slots=True)
class Advice:
    """``rounds`` as in the run file, and how many times as soon the run is at the same loss then, by our estimate."""

    rounds: int
    islands: int
    times_as_soon: float

    def __str__(self) -> str:
        gain = f"{self.islands} islands would be at the same loss some {self.times_as_soon:.1f} times as soon by our estimate"
        return f"With [train] rounds = {self.rounds}, {gain}; train.steps must be a multiple of {self.rounds + 1}."


def advice(
    cluster: Cluster, workload: Workload, seconds: float, *, seed: int = 0, stopped: Callable[[], bool] = lambda: False
) -> Advice | None:
    """The rounds that gain most over ``seconds`` per step; None: none gain.

    ``workload``: with what a run with rounds keeps and sends.
    """
    best = None
    for rounds in map(Rounds, LENGTHS):
        with suppress(Infeasible):
            used = partial(_fraction_since, time.monotonic())
            found = lay_out(
                cluster, workload, rounds=rounds, seed=seed, evaluations=QUICK, time_used=used, stopped=stopped
            )
            islands, predicted = len(found.plan.islands), found.predicted
            each = predicted.iteration_seconds + predicted.exchange_seconds / rounds.length
            times = seconds / each / tokens_needed(islands, workload, rounds)
            if islands > 1 and times > (best.times_as_soon if best is not None else 1 + MARGIN):
                best = Advice(rounds.length, islands, times)
    return best


def _fraction_since(began: float) -> float:
    return (time.monotonic() - began) / SECONDS
