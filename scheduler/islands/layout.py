"""The layout of a run with rounds: which nodes form an island, and each island's plan and share of a step."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import numpy as np

from dtfm.scheduler.cost.exchange import exchange_seconds
from dtfm.scheduler.islands.partition import Partition, partitions, with_newcomers
from dtfm.scheduler.model.chains import chains
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import HORIZON_SECONDS, Decision, Infeasible, Reason
from dtfm.scheduler.model.plan import Plan, from_routes, joined, numbered
from dtfm.scheduler.model.population import Member, Population
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.replan.decision import Standing, decide
from dtfm.scheduler.replan.failover import rerouted
from dtfm.scheduler.replan.price import Terms, island_seconds, price_of_layout
from dtfm.scheduler.replan.switch import MARGIN, Before
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search.population import MOST
from dtfm.scheduler.search.search import TimeUsed

LOOKING_FRACTION = 0.5
"""The fraction of the time in which partitions are looked at. The rest is for the plans of the islands of the best."""

QUICK = 60
"""The number of plans that are tried for an island of a partition that may not be taken."""

Known = dict[tuple[tuple[int, ...], int, int | None], Plan | None]
"""By the numbers of its nodes, its micro-batches and how many plans were tried, the best plan of an island; None: none fits."""


def lay_out(
    cluster: Cluster,
    workload: Workload,
    incumbent: Plan | None = None,
    *,
    length: int,
    population: Population = (),
    overhead: float = 0.0,
    uncertainty: float = 0.0,
    numbers: Mapping[str, int] | None = None,
    horizon: float = HORIZON_SECONDS,
    seed: int = 0,
    generation: int = 0,
    evaluations: int | None = None,
    time_used: TimeUsed | None = None,
    threads: int = 1,
    stopped: Callable[[], bool] = lambda: False,
    known: Known | None = None,
    held: Plan | None = None,
    batches: int | None = 1,
) -> Decision:
    """The layout with the fewest seconds per step, with the exchange's share of a round, times what more islands cost in tokens.

    Islands get shares of a step's micro-batches in proportion to their speed. ``evaluations`` bounds the plans that are tried for
    each island that is drawn. ``numbers``: by node, the number of the island whose state it has. How a layout replaces the
    ``incumbent`` within its ``horizon`` is for `decide` to say. ``overhead``, ``uncertainty``, and ``time_used`` to
    ``stopped``, as in `schedule`. The partitions of the ``population`` (Decision.population of the last layout) are looked at
    first, and its islands are where the search for an island's plan begins.
    ``known``: plans that were tried for other rounds, with all else the same; it gets those that are tried now. ``held``: the
    layout whose stages nodes have in memory, if there is no incumbent. ``batches``: the batches of the workload in a step; None:
    as many as there are islands. Raises Infeasible when no plan fits.
    """
    problem, numbers = (
        Problem(cluster.without_marks(), workload),
        numbers or {},
    )  # each island's plan sees to proven nodes
    standing = None if incumbent is None else Standing.of(problem, incumbent)
    if standing is not None and batches is None and _has_other_batches(standing.layout):
        standing = replace(standing, obstacle=Reason.REQUESTED)
    in_memory = incumbent if held is None else held
    before = None if in_memory is None else Before.of(problem, in_memory)
    terms, known = Terms(length, overhead), {} if known is None else known
    search = _Search(
        cluster, problem, terms, before, horizon, numbers, seed, time_used, threads, stopped, known, population, batches
    )
    known_by = [tuple(n for n, name in enumerate(cluster.ids) if numbers.get(name) == i) for i in {*numbers.values()}]
    as_known = tuple(sorted(part for part in known_by if part and search.speed(part)))
    kept = [with_newcomers(member, cluster) for member in population]
    candidates = chain([as_known], kept, partitions(cluster, lambda nodes: search.speed(nodes) > 0))
    while not search.has_looked and (partition := next(candidates, None)) is not None:
        while partition and not search.has_looked:
            # New islands lose their moments: they must gain as much as another plan must.
            search.look_at(partition, MARGIN if len(partition) == 1 or partition == as_known else 0.0)
            # Fewer islands need fewer tokens: the fastest half may come sooner to the same loss.
            partition = tuple(sorted(sorted(partition, key=search.speed, reverse=True)[: len(partition) // 2]))
    if not search.looked_at:
        return schedule(cluster, workload, seed=seed, generation=generation)  # says what is missing
    _, partition, shares = search.looked_at[0]
    layout = replace(search.layout(partition, shares, evaluations), generation=generation)
    layout = replace(layout, idle=tuple(name for name in cluster.ids if name not in set(layout.nodes)))
    members = dict.fromkeys([Member.of(layout), *search.members()])
    decision = decide(problem, standing, layout, terms, horizon=horizon, uncertainty=uncertainty, spent=search.tried)
    return replace(decision, population=tuple(members)[:MOST])


def _has_other_batches(layout: Plan) -> bool:
    """Whether its steps have not as many batches as there are islands: some were lost, or have begun, within a round."""
    return layout.rounds.count > 0 and layout.rounds.batches_each != len(layout.islands)


def carried_on(plan: Plan, cluster: Cluster, workload: Workload) -> Plan | None:
    """``plan`` without its nodes that are not in the cluster; None: no island can go on.

    Only an island's own nodes have its state. If two of them no longer reach each other, it goes on without one of them, if
    possible without the one that comes later in the cluster. An island that has lost a stage is given up until the next exchange;
    so is one that cannot reach another. Then the others share its micro-batches, in proportion to their own; otherwise nobody's
    change.
    """
    left = [rest for island in plan.islands if (rest := _rest_of(island, cluster, workload)) is not None]
    if not left:
        return None
    while (apart := exchange_seconds(cluster, workload, joined(left, 0))) == math.inf:
        fewest_first = sorted(left, key=lambda island: len(chains(island)))
        without = [[island for island in left if island is not each] for each in fewest_first]
        left = next(
            (rest for rest in without if exchange_seconds(cluster, workload, joined(rest, 0)) < apart), without[0]
        )
    if len(left) < len(plan.islands):
        shares = dealt(plan.micro_batches, [len(chains(island)) for island in left])
        left = [with_share(island, share) for island, share in zip(left, shares, strict=True)]
    at_work = {node for island in left for node in island.nodes}
    idle = tuple(name for name in cluster.ids if name not in at_work)
    frees_first = tuple(name for name in plan.frees_first if name in at_work)
    return replace(joined(left, plan.generation, idle), rounds=plan.rounds, frees_first=frees_first)


def _rest_of(island: Plan, cluster: Cluster, workload: Workload) -> Plan | None:
    """What goes on of the island; None: it is given up."""
    nobody = (frozenset[str](),) * len(workload.layers)
    own = [number for number, name in enumerate(cluster.ids) if name in island.nodes]
    share = replace(workload, micro_batches=len(chains(island)))
    ways = (own, *([number for number in own if number != out] for out in reversed(own)))
    rests = (rerouted(island, Problem(cluster.only(way), share), nobody) for way in ways if way)
    return next((rest for rest in rests if rest is not None), None)


def with_share(island: Plan, share: int) -> Plan:
    """The same stages with this number of micro-batches, along the same chains in the same proportions."""
    ways = chains(island)
    routes = Counter(ways[number * len(ways) // share] for number in range(share))
    return from_routes(island.generation, island.stages, list(routes.items()))


class _Search:
    """What is known of islands, by their nodes and share of a step."""

    def __init__(
        self,
        cluster: Cluster,
        problem: Problem,
        terms: Terms,
        before: Before | None,
        horizon: float,
        numbers: Mapping[str, int],
        seed: int,
        time_used: TimeUsed | None,
        threads: int,
        stopped: Callable[[], bool],
        known: Known,
        population: Population,
        batches: int | None,
    ) -> None:
        self._cluster, self._problem, self._terms, self._batches = cluster, problem, terms, batches
        self._before, self._horizon = before, horizon
        self._numbers, self._seed, self._time_used = numbers, seed, time_used
        self._threads, self._stopped = threads, stopped
        self._plans, self._speeds, self.tried = known, dict[tuple[int, ...], float](), 0
        self._islands = dict.fromkeys(island for member in population for island in member.islands)
        self._seen = set[Partition]()
        self.looked_at: list[tuple[float, Partition, list[int]]] = []
        """Partitions that work, the best first: the price, and the islands' shares of a step's micro-batches."""

    @property
    def has_looked(self) -> bool:
        is_time = self._time_used is not None and self._time_used() > LOOKING_FRACTION
        return bool(self.looked_at) and (is_time or self._stopped())

    def look_at(self, partition: Partition, margin: float) -> None:
        """Prices it by QUICK plans, less ``margin``, and by the change to it. Shares are in proportion to the islands' speed.
        Skips a partition that was looked at, one with an island that cannot train, or with more islands than micro-batches."""
        if partition in self._seen:
            return
        self._seen.add(partition)
        batches = len(partition) if self._batches is None else self._batches
        speeds, whole = [self.speed(nodes) for nodes in partition], batches * self._problem.workload.micro_batches
        if all(speeds) and len(partition) <= whole:
            shares = dealt(whole, speeds)
            with suppress(Infeasible):
                layout = self.layout(partition, shares, QUICK)
                price = price_of_layout(self._problem, layout, self._terms).compared * (1 - margin)
                if self._before is not None:
                    price *= 1 + self._before.switch(layout).counted(self._horizon) / self._horizon
                insort(self.looked_at, (price, partition, shares))

    def members(self) -> Population:
        """The layouts of the best partitions, as QUICK plans have them, the best first."""
        best = self.looked_at[:MOST]
        return tuple(Member.of(self.layout(partition, shares, QUICK)) for _, partition, shares in best)

    def speed(self, nodes: tuple[int, ...]) -> float:
        """Of an island with all micro-batches of a step, in steps per second; 0: it cannot train them."""
        if nodes not in self._speeds:
            plan = self._planned(nodes, self._problem.workload.micro_batches, QUICK)
            self._speeds[nodes] = 1 / island_seconds(self._problem, plan) if plan is not None else 0.0
        return self._speeds[nodes]

    def layout(self, partition: Partition, shares: Sequence[int], evaluations: int | None) -> Plan:
        """Of the islands' plans. Unless they are to be QUICK, they share the time that is left. QUICK ones stay if better."""
        found = list[Plan]()
        for number, (nodes, share) in enumerate(zip(partition, shares, strict=True)):
            tries = {self._planned(nodes, share, QUICK)}
            if evaluations != QUICK:
                tries.add(self._planned(nodes, share, evaluations, len(partition) - number))
            found += sorted((plan for plan in tries if plan is not None), key=self._cost)[:1]
        if len(found) < len(partition):
            raise Infeasible("an island that could train all micro-batches of a step cannot train its share")
        islands = [numbered(plan, number) for number, plan in enumerate(found)]
        return joined(renumbered(islands, self._numbers), 0)

    def _cost(self, island: Plan) -> float:
        """Its seconds, and as much more as it must gain if its nodes have to free memory first."""
        frees = self._before is not None and self._before.freeing(island)
        return island_seconds(self._problem, island) * (1 + MARGIN * bool(frees))

    def _part_used(self, parts: int) -> TimeUsed | None:
        """The time that is left is cut into equal ``parts``: how much of the first is used up."""
        if (used := self._time_used) is None:
            return None
        began = min(used(), 1.0)
        return lambda: parts * (used() - began) / (1 - began) if began < 1 else 1.0

    def _planned(self, nodes: tuple[int, ...], share: int, evaluations: int | None, parts: int = 1) -> Plan | None:
        key = nodes, share, evaluations
        if key not in self._plans:
            workload = replace(self._problem.workload, micro_batches=share)
            try:
                decision = schedule(
                    self._cluster.only(nodes),
                    workload,
                    population=self._islands_of(nodes),
                    held=None if self._before is None else self._before.layout,
                    seed=self._seed,
                    evaluations=evaluations,
                    time_used=self._part_used(parts),
                    threads=self._threads,
                    stopped=self._stopped,
                )
            except Infeasible:
                self._plans[key] = None
            else:
                self.tried += decision.evaluations
                self._plans[key] = replace(decision.plan, idle=())
        return self._plans[key]

    def _islands_of(self, nodes: tuple[int, ...]) -> Population:
        """Of the population, the islands that have more nodes in common with these than not, the nearest first."""
        names = {self._cluster.ids[node] for node in nodes}
        held = {island: {node for stage in island.stages for node in stage} for island in self._islands}
        near = [island for island, others in held.items() if 2 * len(names & others) > len(names | others)]
        near.sort(key=lambda island: -len(names & held[island]))
        return tuple(Member((island,)) for island in near)


def renumbered(islands: Sequence[Plan], before: Mapping[str, int]) -> list[Plan]:
    """Each with the number that most of its nodes know, so that they keep the state that they have. If nobody knows any, the
    first goes on with one that there is: others hand its state out."""
    free = [*range(len(islands) + max(before.values(), default=0) + 1)]
    found = list[Plan]()
    for island in sorted(islands, key=lambda island: -sum(node in before for node in island.nodes)):
        counted = Counter(before[node] for node in island.nodes if before.get(node) in free)
        if not counted and not found:
            counted.update(before.values() or [0])
        number = counted.most_common(1)[0][0] if counted else min(set(free) - {*before.values()})
        free.remove(number)
        found.append(numbered(island, number))
    return sorted(found, key=lambda island: island.stages[0].island)


def dealt(whole: int, weights: Sequence[float]) -> list[int]:
    """``whole`` micro-batches dealt to islands that compute in proportion to ``weights``, at least 1 to each: each of the others
    goes to the one that would be done with it first."""
    counts = np.ones(len(weights), dtype=np.int64)
    for _ in range(whole - len(weights)):
        counts[np.argmin((counts + 1) / weights)] += 1
    return [int(count) for count in counts]
