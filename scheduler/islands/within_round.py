"""Islands of free nodes that begin within a round, beside the islands that go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from dtfm.scheduler.islands.layout import QUICK, dealt, with_share
from dtfm.scheduler.islands.partition import Partition, partitions
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible, Reason
from dtfm.scheduler.model.plan import Plan, joined, numbered
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.replan.decision import Standing, decide
from dtfm.scheduler.replan.price import Terms, island_seconds, price_of_layout
from dtfm.scheduler.schedule import schedule


@dataclass(frozen=True, slots=True)
class Grown:
    """The decision for a layout with new islands, and whether these get the moments of an island that goes on."""

    decision: Decision
    with_moments: bool


def grown(
    cluster: Cluster,
    workload: Workload,
    incumbent: Plan,
    *,
    length: int,
    steps_left: int,
    overhead: float = 0.0,
    uncertainty: float = 0.0,
    seed: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> Grown | None:
    """The incumbent's islands as they are, and new islands of the nodes that it leaves idle; None: that would not pay.

    All islands share a step's micro-batches in proportion to their speed. New islands train ``steps_left`` steps of the round.
    They get moments if these steps gain more than the time to fetch them. Otherwise their moments are zero, as they would be if
    the islands waited for the exchange. ``length``: of a round. ``overhead``, ``uncertainty`` and ``stopped``: as in `schedule`.
    """
    at_work = {*incumbent.nodes}
    free = [number for number, name in enumerate(cluster.ids) if name not in at_work]
    if not free or not steps_left or not at_work <= {*cluster.ids}:
        return None
    problem, apart, whole = Problem(cluster.without_marks(), workload), cluster.only(free), incumbent.micro_batches

    @cache
    def planned(nodes: tuple[int, ...]) -> Plan | None:
        """The plan of a new island with all micro-batches of a step. ``nodes``: numbers of free nodes."""
        try:
            found = schedule(apart.only(nodes), workload, seed=seed, evaluations=QUICK, stopped=stopped)
        except Infeasible:
            return None
        return replace(found.plan, idle=())

    def layout(partition: Partition) -> Plan | None:
        """None: no new island could train, or there would be more islands than micro-batches."""
        new = [plan for nodes in partition if (plan := planned(nodes)) is not None]
        first = max(stage.island for stage in incumbent.stages) + 1
        islands = [*incumbent.islands, *(numbered(plan, number) for number, plan in enumerate(new, first))]
        if not new or len(islands) > whole:
            return None
        shares = dealt(whole, [island.micro_batches / island_seconds(problem, island) for island in islands])
        together = joined([with_share(*each) for each in zip(islands, shares, strict=True)], incumbent.generation)
        idle = tuple(name for name in cluster.ids if name not in {*together.nodes})
        return replace(together, idle=idle, rounds=incumbent.rounds)

    terms = Terms(length, overhead)
    found = [plan for each in partitions(apart, lambda nodes: planned(nodes) is not None) if (plan := layout(each))]
    if not found:
        return None
    best = min(found, key=lambda each: price_of_layout(problem, each, terms).compared)
    horizon = steps_left * price_of_layout(problem, incumbent, terms).step
    for with_moments in (False,) if incumbent.rounds.restarts else (True, False):
        standing = Standing.of(problem, incumbent, with_moments=with_moments)
        decision = decide(problem, standing, best, terms, horizon=horizon, uncertainty=uncertainty)
        if decision.reason is Reason.FASTER:
            return Grown(decision, with_moments)
    return None
