"""The price of a layout: one function for all layouts. A plan without rounds is a layout of one island."""

from __future__ import annotations

from dataclasses import dataclass

from dtfm.scheduler.cost.exchange import exchange_seconds, tokens_needed
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Problem, draft_of, problem_of


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of pricing layouts, beside cluster and workload. ``length`` is a round's length, 0 without rounds. ``overhead``
    is the seconds of each step that the simulation leaves out."""

    length: int = 0
    overhead: float = 0.0


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a step that trains, seconds of an exchange, and the number to compare.

    ``compared`` is the seconds per step, with the exchange's share of a round, times the tokens that the layout's islands need
    for the same loss, for each batch of the run file in a step. More tokens make more steps, and a larger batch makes fewer.
    """

    step: float
    exchange: float
    compared: float


def price_of_layout(problem: Problem, layout: Plan, terms: Terms) -> Price:
    """The price of a layout. The cluster has all its nodes."""
    islands = layout.islands
    step = max(island_seconds(problem, island) for island in islands) + terms.overhead
    if not terms.length:
        return Price(step, 0.0, step)
    exchange = exchange_seconds(problem.cluster, problem.workload, layout)
    more = tokens_needed(len(islands), problem.workload, terms.length)
    batches = layout.micro_batches / problem.workload.micro_batches
    return Price(step, exchange, (step + exchange / terms.length) * more / batches)


def island_seconds(problem: Problem, island: Plan) -> float:
    """Seconds of one island's step, without overhead."""
    own = problem_of_island(problem, island)
    return simulate(own, draft_of(island, own.cluster))


def problem_of_island(problem: Problem, island: Plan) -> Problem:
    """The problem of one island, on its own nodes: the problem itself if the island computes the whole step, otherwise its
    part."""
    whole = island.micro_batches == problem.workload.micro_batches
    return problem if whole else problem_of(island, problem.cluster, problem.workload)
