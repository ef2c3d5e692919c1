"""How many more tokens islands need in this run, from the spread of their changes in the last exchanges.

The planner knows what islands cost in other runs (scheduler/cost/exchange.py). It depends on the batch, the data and on how far
the model is trained, so this run's own exchanges count more and more. They show the noise in the mean change of a round, against
the signal (log/spread.py). In each of H steps the noise is H times as large against the signal: over a round, signals add up, and
noise adds up as its root.

AdamW divides a step by the root of the squared gradients, noise included. An island trains with 1/n of the samples, so its noise
is n times that of the whole batch: with the noise f of a step of the whole batch, an island's step brings
sqrt((1 + f) / (1 + n f)) of the progress of a step of all. With much noise that is 1 / sqrt(n): eight islands need 2.8 times the
tokens, which was measured for a young model (docs/measurements.md). Without noise islands cost nothing. This is a theory: how
well it predicts losses is not measured yet.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.log.spread import Spread
from dtfm.scheduler.cost.exchange import tokens_needed
from dtfm.scheduler.model.workload import Workload

PRIOR = 2
"""Other runs count as this number of exchanges of this run."""


def islands_cost(state: State, workload: Workload) -> float:
    """See Workload.islands_cost. 1 under a sparse codec, which does not send the mean change."""
    spreads = state.ledger.training.spreads
    if not spreads or state.run.network.exchanges_sparsely:
        return 1.0
    usual = replace(workload, islands_cost=1.0)
    seen = [
        (tokens_shown(each) - 1) / (tokens_needed(each.islands, usual, each.length) - 1)
        for each in spreads
        if each.islands > 1
    ]
    return (PRIOR + len(seen) * statistics.median(seen)) / (PRIOR + len(seen)) if seen else 1.0


def tokens_shown(spread: Spread) -> float:
    """The tokens that these islands need for the same loss, as a multiple of one island's: 1 to the root of their number."""
    of_step = spread.noise * spread.length
    return math.sqrt((1 + spread.islands * of_step) / (1 + of_step))
