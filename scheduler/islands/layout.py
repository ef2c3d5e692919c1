"""The layout of a run with rounds: which nodes form an island, and each island's plan and share of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import numpy as np

from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.islands.partition import Partition, partitions
from dtfm.scheduler.model.chains import chains
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import HORIZON_SECONDS, Decision, Infeasible, Predicted, Reason
from dtfm.scheduler.model.plan import Plan, from_routes, joined, validate
from dtfm.scheduler.model.problem import Problem, draft_of
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.replan.failover import rerouted
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.search.search import TimeUsed

MEASURED_PARAMETERS, TOKENS_PER_ISLAND = 10e6, 0.22
"""By how much more tokens a run needs for the same loss with each island after the first, if the model has so many parameters
and islands exchange every 30 steps. Measured in 1,200 steps: 0.16 with two islands, 0.25 with eight; 0.14 and 0.36 where these
exchange every 10 and 100 steps (docs/measurements.md)."""

FALL_BY_PARAMETERS, RISE_BY_STEPS = 0.35, 0.4
"""Exponents by which that changes. The larger the model, the less islands cost. Losses published for one to eight copies
of 35 million to 2.4 billion parameters (arXiv 2503.09799) follow this, if a loss falls as the number of tokens to the power of
-0.05."""

SPARSELY, RISE_SPARSELY = 1.16, 0.22
"""How many times as many tokens it takes if islands exchange their largest changes alone, every 30 steps, and the exponent by
which that changes with these: 0.91 times every 10 (docs/measurements.md)."""

MARGIN = 0.03
"""Fraction of its seconds per step by which a layout must beat the incumbent, one island, and those that there are: estimates
are rough, and new islands lose their moments."""

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
    overhead: float = 0.0,
    numbers: Mapping[str, int] | None = None,
    horizon: float = HORIZON_SECONDS,
    seed: int = 0,
    generation: int = 0,
    evaluations: int | None = None,
    time_used: TimeUsed | None = None,
    threads: int = 1,
    stopped: Callable[[], bool] = lambda: False,
    known: Known | None = None,
) -> Decision:
    """The layout with the fewest seconds per step, with the exchange's share of a round, times what more islands cost in tokens.

    Islands get shares of a step's micro-batches in proportion to their speed. ``evaluations`` bounds the plans that are tried for
    each island that is drawn. ``numbers``: by node, the number of the island whose state it has. A layout that replaces the
    ``incumbent`` must win back within ``horizon`` seconds what it takes to give nodes their state, for which all wait.
    ``overhead``, and ``time_used`` to ``stopped``, as in `schedule`. ``known``: plans that were tried for other rounds, with all
    else the same; it gets those that are tried now. Raises Infeasible when no plan fits.
    """
    search = _Search(
        cluster, workload, length, overhead, seed, time_used, threads, stopped, {} if known is None else known
    )
    numbers = numbers or {}
    known_by = [tuple(n for n, name in enumerate(cluster.ids) if numbers.get(name) == i) for i in {*numbers.values()}]
    standing = tuple(sorted(part for part in known_by if part and search.speed(part)))
    candidates = chain([standing], partitions(cluster, lambda nodes: search.speed(nodes) > 0))
    while not search.has_looked and (partition := next(candidates, None)) is not None:
        while partition and not search.has_looked:
            search.look_at(partition, MARGIN if len(partition) == 1 or partition == standing else 0.0)
            # Fewer islands need fewer tokens: the fastest half may come sooner to the same loss.
            partition = tuple(sorted(sorted(partition, key=search.speed, reverse=True)[: len(partition) // 2]))
    if search.best is None:
        return schedule(cluster, workload, seed=seed, generation=generation)  # says what is missing
    _, partition, shares = search.best
    plan = joined(renumbered(search.plans(partition, shares, evaluations), numbers), generation)
    plan = replace(plan, idle=tuple(name for name in cluster.ids if name not in set(plan.nodes)))
    validate(plan, cluster.ids, workload)
    seconds = search.price(plan.islands)
    reason, sentence = Reason.FIRST, "No plan was in force."
    if incumbent is not None:
        reason, sentence = Reason.NODE_LOST, "The plan used a node that has left."
        if set(incumbent.nodes) <= set(cluster.ids):
            before = search.price(incumbent.islands)
            reason = Reason.FASTER
            sentence = f"Another layout takes {seconds:.3g} s per step instead of {before:.3g} s."
            waiting = _state_seconds(plan, incumbent, cluster, workload)
            if 1 - seconds / before - waiting / horizon <= MARGIN:
                idle = tuple(name for name in cluster.ids if name not in set(incumbent.nodes))
                plan, reason = replace(incumbent, idle=idle), Reason.KEPT
                sentence = f"The layout stays: another would not gain the required {MARGIN:.0%}"
                sentence += f", as nodes would wait {waiting:,.0f} s for state." if waiting > 1 else "."
    step, exchange = search.seconds(plan.islands)
    if (count := len(plan.islands)) > 1:
        share = exchange / (length * step + exchange)
        sentence += f" {count} islands exchange every {length} steps: {exchange:.3g} s, {share:.0%} of a round."
        more = tokens_needed(count, workload, length) - 1
        sentence += f" For the same loss they need some {more:.0%} more tokens than one island."
    return Decision(plan, Predicted(step, 0.0, exchange), 0.0, reason, sentence, search.tried)


def tokens_needed(islands: int, workload: Workload, length: float) -> float:
    """For the same loss, in those that a run without rounds needs. An estimate. Smaller models count as those measured."""
    parameters = sum(layer.parameter_bytes for layer in workload.layers) / 4  # they are trained in float32
    size = max(1.0, parameters / MEASURED_PARAMETERS)
    by_island: float = TOKENS_PER_ISLAND * size**-FALL_BY_PARAMETERS * (length / 30) ** RISE_BY_STEPS
    sparsely = SPARSELY * (length / 30) ** RISE_SPARSELY if workload.exchanged_with_all and islands > 1 else 1.0
    return (1 + by_island * (islands - 1)) * sparsely


def carried_on(plan: Plan, cluster: Cluster, workload: Workload) -> Plan | None:
    """``plan`` without its nodes that are not in the cluster; None: no island can go on.

    An island that has lost a stage is given up until the next exchange, as only its own nodes have its state; so is one that
    cannot reach another. Then the others share its micro-batches, in proportion to their own; otherwise nobody's change.
    """
    nobody = (frozenset[str](),) * len(workload.layers)
    left = []
    for island in plan.islands:
        own = [number for number, name in enumerate(cluster.ids) if name in island.nodes]
        share = replace(workload, micro_batches=len(chains(island)))
        if own and (rest := rerouted(island, Problem(cluster.only(own), share), nobody)) is not None:
            left.append(rest)
    if not left:
        return None
    while (apart := exchange_seconds(cluster, workload, joined(left, 0))) == math.inf:
        fewest_first = sorted(left, key=lambda island: len(chains(island)))
        without = [[island for island in left if island is not each] for each in fewest_first]
        left = next(
            (rest for rest in without if exchange_seconds(cluster, workload, joined(rest, 0)) < apart), without[0]
        )
    if len(left) < len(plan.islands):
        shares = _dealt(workload.micro_batches, [len(chains(island)) for island in left])
        left = [with_share(island, share) for island, share in zip(left, shares, strict=True)]
    at_work = {node for island in left for node in island.nodes}
    idle = tuple(name for name in cluster.ids if name not in at_work)
    return replace(joined(left, plan.generation, idle), rounds=plan.rounds)


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
        workload: Workload,
        length: int,
        overhead: float,
        seed: int,
        time_used: TimeUsed | None,
        threads: int,
        stopped: Callable[[], bool],
        known: Known,
    ) -> None:
        self._cluster, self._workload, self._length, self._overhead = cluster, workload, length, overhead
        self._seed, self._time_used, self._threads, self._stopped = seed, time_used, threads, stopped
        self._plans, self._speeds, self.tried = known, dict[tuple[int, ...], float](), 0
        self.best: tuple[float, Partition, list[int]] | None = None
        """Of the partitions that were looked at: its price, and the islands' shares of a step's micro-batches."""

    @property
    def has_looked(self) -> bool:
        is_time = self._time_used is not None and self._time_used() > LOOKING_FRACTION
        return self.best is not None and (is_time or self._stopped())

    def look_at(self, partition: Partition, margin: float) -> None:
        """Prices it by QUICK plans, less ``margin``, with shares in proportion to the islands' speed, unless an island cannot
        train, or there are fewer micro-batches than islands."""
        speeds, whole = [self.speed(nodes) for nodes in partition], self._workload.micro_batches
        if all(speeds) and len(partition) <= whole:
            shares = _dealt(whole, speeds)
            with suppress(Infeasible):
                found = self.price(self.plans(partition, shares, QUICK)) * (1 - margin), partition, shares
                self.best = min(self.best or found, found)

    def speed(self, nodes: tuple[int, ...]) -> float:
        """Of an island with all micro-batches of a step, in steps per second; 0: it cannot train them."""
        if nodes not in self._speeds:
            plan = self._planned(nodes, self._workload.micro_batches, QUICK)
            self._speeds[nodes] = 1 / self._seconds(plan) if plan is not None else 0.0
        return self._speeds[nodes]

    def plans(self, partition: Partition, shares: Sequence[int], evaluations: int | None) -> list[Plan]:
        """The islands' plans. Unless they are to be QUICK, they share the time that is left; QUICK ones that are better stay."""
        found = list[Plan]()
        for number, (nodes, share) in enumerate(zip(partition, shares, strict=True)):
            tries = {self._planned(nodes, share, QUICK)}
            if evaluations != QUICK:
                tries.add(self._planned(nodes, share, evaluations, len(partition) - number))
            found += sorted((plan for plan in tries if plan is not None), key=self._seconds)[:1]
        if len(found) < len(partition):
            raise Infeasible("an island that could train all micro-batches of a step cannot train its share")
        return [numbered(plan, number) for number, plan in enumerate(found)]

    def seconds(self, islands: Sequence[Plan]) -> tuple[float, float]:
        """Of a step that trains, and of the exchange."""
        exchange = exchange_seconds(self._cluster, self._workload, joined(islands, 0))
        return max(map(self._seconds, islands)) + self._overhead, exchange

    def price(self, islands: Sequence[Plan]) -> float:
        """What is compared: seconds per step, as more tokens make more steps."""
        step, exchange = self.seconds(islands)
        return (step + exchange / self._length) * tokens_needed(len(islands), self._workload, self._length)

    def _seconds(self, island: Plan) -> float:
        problem = problem_of(island, self._cluster, self._workload)
        return simulate(problem, draft_of(island, problem.cluster))

    def _part_used(self, parts: int) -> TimeUsed | None:
        """The time that is left is cut into equal ``parts``: how much of the first is used up."""
        if (used := self._time_used) is None:
            return None
        began = min(used(), 1.0)
        return lambda: parts * (used() - began) / (1 - began) if began < 1 else 1.0

    def _planned(self, nodes: tuple[int, ...], share: int, evaluations: int | None, parts: int = 1) -> Plan | None:
        key = nodes, share, evaluations
        if key not in self._plans:
            workload = replace(self._workload, micro_batches=share)
            try:
                decision = schedule(
                    self._cluster.only(nodes),
                    workload,
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


def problem_of(island: Plan, cluster: Cluster, workload: Workload) -> Problem:
    """What one island of a plan computes, on its own nodes."""
    number = {name: index for index, name in enumerate(cluster.ids)}
    own = cluster.only([number[node] for node in island.nodes])
    return Problem(own, replace(workload, micro_batches=len(chains(island))))


def exchange_seconds(cluster: Cluster, workload: Workload, plan: Plan) -> float:
    """Seconds in which all holders of each layer, over all islands, send their changes and get the sums; 0 for one island.

    Each of n holders sends the others their shards of its changes, then all of them the sum of its own: 2 (n - 1) / n of its
    stage's bytes. Under a sparse codec an island's holders divide its changes, and send theirs to all others. What a node sends
    shares its line, as does what it gets; one that is not known is as fast as the fastest of its links. The slowest counts.
    """
    if len(plan.islands) == 1:
        return 0.0
    number = {name: index for index, name in enumerate(cluster.ids)}
    sent = np.zeros(cluster.bandwidth.shape)  # bytes, from one node to another
    for layer, costs in enumerate(workload.layers):
        stages = [stage.replicas for stage in plan.stages if stage.layers[0] <= layer < stage.layers[1]]
        group = [number[node] for replicas in stages for node in replicas]
        size = costs.parameter_bytes * workload.sent_per_exchanged_byte
        for replicas in stages:
            own = [number[node] for node in replicas]
            sent[np.ix_(own, group)] += size * (1 / len(own) if workload.exchanged_with_all else 2 / len(group))
    np.fill_diagonal(sent, 0.0)
    used = sent > 0
    speed = np.where(used, cluster.bandwidth, 0.0)
    line, across = cluster.line, cluster.crossing(speed)
    fastest = (np.bincount(line, across.max(axis=axis))[line] for axis in (1, 0))  # of all nodes on the line
    lines = np.concatenate([np.fmin(each, known) for each, known in zip(fastest, cluster.carries, strict=True)])
    totals = np.concatenate(cluster.on_lines(sent))
    bytes_of, bytes_per_second = np.concatenate([totals, sent[used]]), np.concatenate([lines, speed[used]])
    busy = bytes_of > 0
    if (bytes_per_second[busy] == 0).any():
        return float("inf")
    return float((bytes_of[busy] / bytes_per_second[busy]).max() + 2 * cluster.latency[used].max())


def numbered(island: Plan, number: int) -> Plan:
    return replace(island, stages=tuple(replace(stage, island=number) for stage in island.stages))


def _state_seconds(plan: Plan, before: Plan, cluster: Cluster, workload: Workload) -> float:
    """Seconds until the slowest node has the state that it lacks, over its fastest link from one who has some, or its line.
    With rounds, nobody waits for a node that trains nothing now and is for a new island: it copies meanwhile."""
    going_on, down = {stage.island for stage in before.stages}, cluster.carries[1]
    held = {node: (stage.island, range(*stage.layers)) for stage in before.stages for node in stage.replicas}
    seconds = 0.0
    for stage in plan.stages:
        for node in stage.replicas:
            if before.rounds.count and node not in held and stage.island not in going_on:
                continue
            island, layers = held.get(node, (stage.island, range(0)))
            is_new = stage.island not in going_on  # it begins with what all islands share
            has = layers if is_new or island == stage.island else range(0)
            lacks = sum(workload.layers[n].parameter_bytes for n in range(*stage.layers) if n not in has)
            number = cluster.ids.index(node)
            donors = [n for n, name in enumerate(cluster.ids) if name in held and n != number]
            others = [float(cluster.bandwidth[n, number]) for n in donors]
            line = np.fmin(max(others, default=0.0), down[number])
            moved = lacks * (
                workload.bytes_shared_per_parameter_byte if is_new else workload.bytes_moved_per_parameter_byte
            )
            seconds = max(seconds, moved / line if lacks and line else 0.0)
    return seconds


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


def _dealt(whole: int, weights: Sequence[float]) -> list[int]:
    """``whole`` micro-batches dealt to islands that compute in proportion to ``weights``, at least 1 to each: each of the others
    goes to the one that would be done with it first."""
    counts = np.ones(len(weights), dtype=np.int64)
    for _ in range(whole - len(weights)):
        counts[np.argmin((counts + 1) / weights)] += 1
    return [int(count) for count in counts]
