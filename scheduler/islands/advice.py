"""How much sooner a run that exchanges gradients in every step would come to the same loss with rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dtfm.scheduler.islands.layout import QUICK, first_part, lay_out, tokens_needed
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.rounds import Rounds
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.search.search import TimeUsed

MARGIN = 0.1
"""The estimates are rough: what gains less is not advised."""


@dataclass(frozen=True, slots=True)
class Advice:
    """``rounds`` as in the run file, and how many times as soon the run is at the same loss then, by our estimate."""

    rounds: int
    islands: int
    times_as_soon: float

    def __str__(self) -> str:
        gain = f"{self.islands} islands would be at the same loss some {self.times_as_soon:.1f} times as soon"
        return f"With [train] rounds = {self.rounds}, {gain} by our estimate."


def advice(
    cluster: Cluster,
    workload: Workload,
    without: float,
    among: Sequence[Rounds],
    *,
    seed: int = 0,
    time_used: TimeUsed | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Advice | None:
    """Of the rounds ``among`` those that gain most over a plan that takes ``without`` seconds per step; None: none gain.

    ``workload``: with what a run with rounds keeps and sends. ``time_used`` and ``stopped`` as in `schedule`.
    """
    best = None
    for number, rounds in enumerate(among):
        with suppress(Infeasible):
            found = lay_out(
                cluster,
                workload,
                rounds=rounds,
                seed=seed,
                evaluations=QUICK,
                time_used=first_part(time_used, len(among) - number),
                stopped=stopped,
            )
            islands, predicted = len(found.plan.islands), found.predicted
            each = predicted.iteration_seconds + predicted.exchange_seconds / rounds.length
            times = without / each / tokens_needed(islands, workload, rounds)
            if islands > 1 and times > (best.times_as_soon if best is not None else 1 + MARGIN):
                best = Advice(rounds.length, islands, times)
    return best
