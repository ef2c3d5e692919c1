"""How much sooner a run that exchanges gradients in every step would come to the same loss with rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dtfm.scheduler.cost.exchange import tokens_needed
from dtfm.scheduler.islands.layout import QUICK, Known, lay_out
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.population import Population
from dtfm.scheduler.model.workload import Workload

MARGIN = 0.2
"""The estimates are rough, and with rounds the result is not what one machine would train: what gains less is not advised."""

NO_ROUNDS_PAY = "With rounds it would not reach the same loss much faster."


@dataclass(frozen=True, slots=True)
class Advice:
    """``rounds`` as in the run file. ``speedup``: the time to the same loss without rounds, over that with them. An estimate."""

    rounds: int
    islands: int
    speedup: float

    def __str__(self) -> str:
        return f"With [train] rounds = {self.rounds}, {self.gain}."

    def pays(self, standing: int) -> bool:
        """Whether it gains enough, where rounds of the ``standing`` length are in force (0: none)."""
        return self.islands > 1 and self.counts_as(standing) > (1.0 if standing else 1 + MARGIN)

    def counts_as(self, standing: int) -> float:
        return self.speedup * (1 + MARGIN * (self.rounds == standing))

    @property
    def gain(self) -> str:
        times = f"some {self.speedup:.1f} times as fast as without rounds, by our estimate"
        return f"{self.islands} islands that exchange every {self.rounds} steps reach the same loss {times}"


def advice(
    cluster: Cluster,
    workload: Workload,
    without: float,
    among: Sequence[int],
    *,
    standing: int = 0,
    population: Population = (),
    overhead: float = 0.0,
    numbers: Mapping[str, int] | None = None,
    seed: int = 0,
    stopped: Callable[[], bool] = lambda: False,
    known: Known | None = None,
    held: Plan | None = None,
    batches: int | None = 1,
) -> Advice | None:
    """Of the lengths of a round ``among`` the one that gains most over a plan that takes ``without`` seconds per step; None: none
    gains. What is in force, the ``standing`` length (0: no rounds), is left only for what gains MARGIN more.

    ``workload``: with what rounds take. ``population``, ``overhead``, ``numbers``, ``known``, ``held`` and ``batches`` as in
    `lay_out`, ``stopped`` as in `schedule`.
    """
    found, known = list[Advice](), {} if known is None else known
    for length in among:
        with suppress(Infeasible):
            decision = lay_out(
                cluster,
                workload,
                length=length,
                population=population,
                overhead=overhead,
                numbers=numbers,
                seed=seed,
                evaluations=QUICK,
                stopped=stopped,
                known=known,
                held=held,
                batches=batches,
            )
            found.append(advice_of(decision, length, workload, without))
    best = max(found, key=lambda each: each.counts_as(standing), default=None)
    return best if best is not None and best.pays(standing) else None


def advice_of(decision: Decision, length: int, workload: Workload, without: float) -> Advice:
    """What this layout, with rounds of this length, gains over a plan that takes ``without`` seconds per step."""
    islands, predicted = len(decision.plan.islands), decision.predicted
    each = predicted.iteration_seconds + predicted.exchange_seconds / length
    batches = decision.plan.micro_batches / workload.micro_batches
    return Advice(length, islands, without / each / tokens_needed(islands, workload, length) * batches)
