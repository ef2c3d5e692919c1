"""How much sooner a run that exchanges gradients in every step would come to the same loss with rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dtfm.scheduler.islands.layout import QUICK, Known, lay_out, tokens_needed
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Infeasible
from dtfm.scheduler.model.rounds import Rounds
from dtfm.scheduler.model.workload import Workload

MARGIN = 0.1
"""The estimates are rough: what gains less is not advised."""

NO_ROUNDS_PAY = "With rounds it would not reach the same loss much faster."


@dataclass(frozen=True, slots=True)
class Advice:
    """``rounds`` as in the run file. ``speedup``: the time to the same loss without rounds, over that with them. An estimate."""

    rounds: int
    islands: int
    speedup: float

    def __str__(self) -> str:
        gain = f"{self.islands} islands would reach the same loss some {self.speedup:.1f} times as fast"
        return f"With [train] rounds = {self.rounds}, {gain}, by our estimate."


def advice(
    cluster: Cluster,
    workload: Workload,
    without: float,
    among: Sequence[Rounds],
    *,
    seed: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> Advice | None:
    """Of the rounds ``among`` those that gain most over a plan that takes ``without`` seconds per step; None: none gain.

    ``workload``: with what a run with rounds keeps and sends. ``stopped`` as in `schedule`.
    """
    best, known = None, Known()
    for rounds in among:
        with suppress(Infeasible):
            found = lay_out(
                cluster, workload, rounds=rounds, seed=seed, evaluations=QUICK, stopped=stopped, known=known
            )
            islands, predicted = len(found.plan.islands), found.predicted
            each = predicted.iteration_seconds + predicted.exchange_seconds / rounds.length
            speedup = without / each / tokens_needed(islands, workload, rounds)
            if islands > 1 and speedup > (best.speedup if best is not None else 1 + MARGIN):
                best = Advice(rounds.length, islands, speedup)
    return best
