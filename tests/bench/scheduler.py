"""What the scheduler reaches, and how fast: ``python -m tests.bench.scheduler [--json] [--quick] [--plot FILE.svg]``.

One row per measure; ``against`` is what the value is compared with and ``ratio`` the value over it. One core; nodes are
shuffled before planning. The plot is cost against planning time on the paper's networks.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from scipy.stats import spearmanr

from dtfm.scheduler.cluster import Cluster, Node
from dtfm.scheduler.decision import Objective
from dtfm.scheduler.evaluate import Evaluator
from dtfm.scheduler.exact import all_cuts, improve
from dtfm.scheduler.migrate import Holdings
from dtfm.scheduler.moves import Shape
from dtfm.scheduler.networks import PAPER_COSTS, Network, paper_network, paper_workload
from dtfm.scheduler.order import best_order
from dtfm.scheduler.paper import paper_seconds
from dtfm.scheduler.paper_search import PaperEvaluator
from dtfm.scheduler.plan import Plan
from dtfm.scheduler.problem import Groups, Problem, draft_of
from dtfm.scheduler.schedule import schedule
from dtfm.scheduler.seeds import all_groups
from dtfm.scheduler.simulate import simulate
from dtfm.scheduler.workload import Layer, Workload
from tests.bench.clusters import (
    compact_cluster,
    part_of,
    random_cluster,
    random_groups,
    random_workload,
    regional_cluster,
    shuffled,
)
from tests.bench.plot import svg
from tests.bench.rows import Row, show

BEST_KNOWN = {
    Network.DATA_CENTER: 3.4398,
    Network.SPOT: 31.6342,
    Network.UNIVERSITIES: 16.0868,
    Network.REGIONAL: 34.8020,
    Network.WORLDWIDE: 49.2184,
}


def paper_networks(seeds: int) -> Iterator[Row]:
    for network in Network:
        cluster, workload = paper_network(network), paper_workload()
        best = BEST_KNOWN[network]
        problem = Problem(cluster, workload)
        for name, value in (
            ("random groups, best order", random_baseline(problem)),
            ("region order, in blocks", ordered(problem, blocks=True)),
            ("region order, dealt out", ordered(problem, blocks=False)),
        ):
            yield Row(f"{network}: {name}", value, "s", "best known", value / best)
        costs, seconds = [], []
        for seed in range(seeds):
            began = time.process_time()
            decision = schedule(shuffled(cluster, seed), workload, objective=Objective.PAPER, seed=seed)
            seconds.append(time.process_time() - began)
            assert decision.predicted.paper is not None
            costs.append(decision.predicted.paper.total)
        yield Row(f"{network}: found, worst of {seeds} seeds", max(costs), "s", "best known", max(costs) / best)
        bound = decision.lower_bound_seconds
        yield Row(f"{network}: certified lower bound", bound, "s", "found", bound / min(costs))
        yield Row(f"{network}: time to plan on one core, longest", max(seconds), "s", "limit 10 s", max(seconds) / 10)


def random_baseline(problem: Problem) -> float:
    costs = []
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(64).tolist()
        costs.append(best_ordered(problem, tuple(tuple(order[8 * i : 8 * i + 8]) for i in range(8))))
    return statistics.mean(costs)


def ordered(problem: Problem, blocks: bool) -> float:
    starts = range(PAPER_COSTS.stages)
    return best_ordered(
        problem, tuple(tuple(range(8 * i, 8 * i + 8)) if blocks else tuple(range(i, 64, 8)) for i in starts)
    )


def best_ordered(problem: Problem, groups: Groups) -> float:
    evaluator = PaperEvaluator.of(problem)
    class_of = {node: index for index, nodes in enumerate(evaluator.members) for node in nodes}
    keys = [tuple(sorted(class_of[node] for node in group)) for group in groups]
    cost = np.array([[evaluator.boundary(a, b)[0] for b in keys] for a in keys])
    return paper_seconds(problem, tuple(groups[stage] for stage in best_order(cost)[1])).total


def reached(network: Network) -> list[tuple[float, float]]:
    """(seconds, cost over best known), by seconds: each point is a run of its own that was given so many evaluations.

    The search divides what it is given, so that a larger budget is not the smaller one continued.
    """
    points: list[tuple[float, float]] = []
    for budget in (1, 250, 1_000, 4_000, 15_000, 60_000):
        began = time.process_time()
        decision = schedule(
            shuffled(paper_network(network), 1),
            paper_workload(),
            objective=Objective.PAPER,
            seed=1,
            evaluations=budget,
        )
        assert decision.predicted.paper is not None
        points.append((time.process_time() - began, decision.predicted.paper.total / BEST_KNOWN[network]))
    return sorted(points)


def small_clusters(sizes: dict[int, int]) -> Iterator[Row]:
    """Against every choice of groups and every cut: four nodes by brute force, more without those that a bound rules out.

    The bound is tested against brute force in tests/scheduler/test_exact.py. Six nodes have 9,365 choices of groups, each with
    up to 6 cuts; eight nodes have a million and take hours.
    """
    for count, clusters in sizes.items():
        ratios = []
        for seed in range(clusters):
            cluster, workload = random_cluster(seed, count), random_workload(seed, layers=5, micro_batches=6)
            decision = schedule(cluster, workload, seed=seed)
            ratios.append(decision.predicted.iteration_seconds / optimum(cluster, workload, decision.plan))
        equal = sum(ratio < 1 + 1e-9 for ratio in ratios)
        yield Row(f"{count} nodes: plans equal to the best of all", equal, "plans", "clusters", equal / clusters)
        yield Row(f"{count} nodes: worst plan", max(ratios), "x", "the best of all", max(ratios))


def optimum(cluster: Cluster, workload: Workload, found: Plan) -> float:
    layers, nodes = len(workload.layers), len(cluster.nodes)
    evaluator = Evaluator(Problem(cluster, workload), keep_idle_hands=False)
    shape = Shape(most_stages=min(nodes, layers))
    if nodes > 4:
        draft = draft_of(found, cluster)
        start = evaluator.simulated(draft.groups, draft.cuts)
        return improve(evaluator, shape, start, over=lambda: False).seconds
    return min(
        evaluator.simulated(groups, tuple(cuts)).seconds
        for groups in all_groups(nodes, shape)
        for cuts in all_cuts(layers, len(groups)).tolist()
    )


def estimate_against_simulation(clusters: int) -> Iterator[Row]:
    ranks, errors, fast_times, exact_times = [], [], [], []
    for seed in range(clusters):
        rng = Random(seed)
        nodes = rng.choice([4, 8, 12, 16])
        problem = Problem(random_cluster(seed, nodes), random_workload(seed, rng.choice([8, 24]), rng.choice([8, 32])))
        evaluator = Evaluator(problem, keep_idle_hands=False)
        began = time.perf_counter()
        drawn = [evaluator.estimated(random_groups(rng, nodes)) for _ in range(50)]
        fast_times.append((time.perf_counter() - began) / 50)
        found = [candidate for candidate in drawn if candidate.feasible]
        began = time.perf_counter()
        exact = np.array([simulate(problem, candidate.draft) for candidate in found])
        exact_times.append((time.perf_counter() - began) / len(found))
        fast = np.array([candidate.seconds for candidate in found])
        ranks.append(float(spearmanr(fast, exact)[0]))
        errors += (np.abs(fast - exact) / exact).tolist()
    rank, error = statistics.mean(ranks), statistics.median(errors)
    yield Row("estimate against simulation: rank correlation, mean", rank, "", "goal 0.95", rank / 0.95)
    yield Row("estimate against simulation: rank correlation, least", min(ranks), "", "goal 0.95", min(ranks) / 0.95)
    yield Row("estimate against simulation: median error", error, "", "goal 0.1", error / 0.1)
    fast_ms, exact_ms = 1e3 * statistics.mean(fast_times), 1e3 * statistics.mean(exact_times)
    yield Row("a plan made and estimated", fast_ms, "ms")
    yield Row("a plan simulated", exact_ms, "ms", "made and estimated", exact_ms / fast_ms)


def handicapped_node() -> Iterator[Row]:
    workload = Workload(tuple(Layer(f"l{i}", 2e11, 2e7, 1e6) for i in range(12)), 30)
    nodes = tuple(Node(f"n{i}", 1e13, 8e9) for i in range(15))
    bandwidth = np.full((16, 16), 1e8)
    latency = np.full((16, 16), 1e-3)
    alone = schedule(Cluster(nodes, latency[:15, :15], bandwidth[:15, :15]), workload).predicted.iteration_seconds
    behind = bandwidth.copy()
    behind[15, :] = behind[:, 15] = 1e6
    for name, node, links in (
        ("speed", Node("slow", 1e11, 8e9), bandwidth),
        ("bandwidth", Node("slow", 1e13, 8e9), behind),
    ):
        found = schedule(Cluster((*nodes, node), latency, links), workload).predicted.iteration_seconds
        yield Row(f"15 nodes and one at 1% {name}", found, "s per step", "without it", found / alone)


def replay(events: int) -> Iterator[Row]:
    """Joins, leaves and drifts, 10 minutes apart: seconds to do the steps that replanning from scratch each time does."""
    policies: dict[str, Callable[[Cluster, Plan | None, int], tuple[Plan, float]]] = {
        "with the incumbent": with_incumbent,
        "from scratch each time": from_scratch,
        "only when a node is lost": only_when_lost,
    }
    steps: dict[str, float] = {}
    for name, policy in policies.items():
        rng = np.random.default_rng(3)
        everyone = random_cluster(11, 20)
        present = list(range(12))
        plan: Plan | None = None
        done = moved = 0.0
        for event in range(events):
            kind = rng.integers(3)
            absent = [node for node in range(20) if node not in present]
            if kind == 0 and absent:
                present.append(int(rng.choice(absent)))
            elif kind == 1 and len(present) > 8:
                present.remove(int(rng.choice(present)))
            else:
                drift = rng.uniform(0.7, 1.4, everyone.bandwidth.shape)
                everyone = replace(everyone, bandwidth=everyone.bandwidth * drift)
            cluster = part_of(everyone, present)
            plan, moving = policy(cluster, plan, event)
            done += max(0.0, HORIZON - moving) / step_seconds(cluster, plan)
            moved += moving
        steps[name] = done
        against, other = next(iter(steps.items()))
        yield Row(f"replay of {events} events, {name}: steps done", done, "steps", against, done / other)
        yield Row(f"replay of {events} events, {name}: moving", moved, "s")


HORIZON = 600.0
REPLAY_WORKLOAD = Workload(tuple(Layer(f"l{i}", 2e11, 5e7, 1e6) for i in range(12)), 16)


def with_incumbent(cluster: Cluster, plan: Plan | None, event: int) -> tuple[Plan, float]:
    decision = schedule(cluster, REPLAY_WORKLOAD, plan, seed=event, evaluations=600, horizon=HORIZON)
    return decision.plan, decision.predicted.migration_seconds


def from_scratch(cluster: Cluster, plan: Plan | None, event: int) -> tuple[Plan, float]:
    found = schedule(cluster, REPLAY_WORKLOAD, seed=event, evaluations=600).plan
    if plan is None:
        return found, 0.0
    draft = draft_of(found, cluster)
    return found, Holdings.of(Problem(cluster, REPLAY_WORKLOAD), plan).seconds(draft.groups, draft.cuts)


def only_when_lost(cluster: Cluster, plan: Plan | None, event: int) -> tuple[Plan, float]:
    if plan is not None and set(plan.nodes) <= set(cluster.ids):
        return plan, 0.0
    return with_incumbent(cluster, plan, event)


def step_seconds(cluster: Cluster, plan: Plan) -> float:
    return simulate(Problem(cluster, REPLAY_WORKLOAD), draft_of(plan, cluster))


def scale(nodes: int, seconds: float) -> Iterator[Row]:
    cluster = regional_cluster(nodes)
    workload = Workload(tuple(Layer(f"l{i}", 2e11, 1e8, 4e6) for i in range(24)), nodes // 2)
    plan: Plan | None = None
    for name, limit in (("cold plan", seconds), ("replan", seconds / 10)):
        began = time.perf_counter()
        plan = schedule(cluster, workload, plan, deadline=past(began + 0.8 * limit)).plan
        took = time.perf_counter() - began
        yield Row(
            f"{nodes} nodes, {name}, told to end after {0.8 * limit:.1f} s", took, "s", f"{limit:g} s", took / limit
        )
    yield most_memory(2)


def scale_compact(nodes: int, limit: float) -> Iterator[Row]:
    workload = Workload(tuple(Layer(f"l{i}", 2e11, 1e8, 4e6) for i in range(24)), nodes // 2)
    began = time.perf_counter()
    schedule(compact_cluster(nodes), workload, deadline=past(began + limit / 2))
    took = time.perf_counter() - began
    yield Row(f"{nodes} nodes, compact, told to end after {limit / 2:g} s", took, "s", f"{limit:g} s", took / limit)
    yield most_memory(4)


def most_memory(limit: float) -> Row:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    return Row("most memory so far", peak, "GiB", f"limit {limit:g} GiB", peak / limit)


def past(moment: float) -> Callable[[], bool]:
    return lambda: time.perf_counter() > moment


def rows(quick: bool) -> Iterator[Row]:
    yield from paper_networks(2 if quick else 10)
    yield from estimate_against_simulation(4 if quick else 20)
    yield from small_clusters({4: 4, 5: 2} if quick else {4: 30, 5: 50, 6: 20})
    yield from handicapped_node()
    yield from replay(10 if quick else 40)
    yield from scale(256 if quick else 1024, 10.0 if quick else 30.0)
    yield from scale_compact(2_048 if quick else 10_240, 10.0 if quick else 120.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--quick", action="store_true", help="fewer seeds, clusters and events")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="cost against planning time, on the paper's networks"
    )
    options = parser.parse_args()
    made = []
    for row in rows(options.quick):
        print(f"{row.measure}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
        made.append(row)
    show("The scheduler", made, options.json)
    if options.plot is not None:
        lines = {network.value: reached(network) for network in Network}
        across, up = "seconds on one core", "cost / best known"
        options.plot.write_text(svg("Cost reached in a time, the paper's objective", across, up, lines))
        print(f"The plot is in {options.plot}.", file=sys.stderr)


if __name__ == "__main__":
    main()
