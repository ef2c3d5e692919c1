"""Nodes join, leave and drift. Three ways to plan for that are compared by their time and by the bytes that they move.

Between two events every way trains the same number of steps. A way's total is the sum of iteration time x steps, plus the time
to move state; nothing is trained then. (That is the worst case, as nodes fetch state while they train.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dtfm.scheduler.assemble.evaluate import missing_links
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.cost.state_transfer import Holdings
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Problem, draft_of
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.schedule import schedule
from tests.bench.clusters import part_of, regional_cluster
from tests.scheduler.plans import memory_shortfall

STEPS = 100
"""Steps between two events."""
FEWEST, FIRST, MOST = 48, 56, 64
WORKLOAD = Workload(tuple(Layer(f"l{i}", 2e11, 5e7, 1e6) for i in range(12)), 32)
EVALUATIONS = 250


Answer = Callable[[Cluster, "Plan | None", float, int], Plan]
"""Returns the plan to follow, from the cluster, the plan so far, the seconds until the next event at its pace, and a seed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one way over all events. ``training`` and ``moving`` are seconds of the run, ``planning`` of a core."""

    training: float
    moving: float
    moved_bytes: float
    changes: int
    planning: float

    @property
    def total(self) -> float:
        return self.training + self.moving


def changing_cluster(events: int, seed: int) -> Iterator[Cluster]:
    """The cluster at first and after each event. Each event is a join, a leave or a drift with equal chances.

    A drift changes the speed of a node's device, and of all its links, to 0.4 to 1.6 of their first speed.
    """
    rng = np.random.default_rng(seed)
    everyone = regional_cluster(MOST + 8, seed)
    speed, link = np.ones(len(everyone.nodes)), np.ones(len(everyone.nodes))
    present = sorted(rng.permutation(len(everyone.nodes))[:FIRST].tolist())
    for event in range(events + 1):
        kind = rng.integers(3)
        if event == 0:
            pass
        elif kind == 0 and len(present) < MOST:
            present.append(int(rng.choice(np.setdiff1d(np.arange(len(everyone.nodes)), present))))
        elif kind == 1 and len(present) > FEWEST:
            present.remove(int(rng.choice(present)))
        else:
            node = rng.choice(present)
            speed[node], link[node] = rng.uniform(0.4, 1.6, 2)
        nodes = tuple(replace(node, flops=node.flops * speed[index]) for index, node in enumerate(everyone.nodes))
        bandwidth = everyone.bandwidth * np.minimum(link[:, None], link[None])
        yield part_of(Cluster(nodes, everyone.latency, bandwidth), present)


def with_incumbent(cluster: Cluster, plan: Plan | None, until_next: float, seed: int) -> Plan:
    return schedule(cluster, WORKLOAD, plan, seed=seed, evaluations=EVALUATIONS, horizon=until_next).plan


def from_scratch(cluster: Cluster, plan: Plan | None, until_next: float, seed: int) -> Plan:
    return schedule(cluster, WORKLOAD, seed=seed, evaluations=EVALUATIONS).plan


def with_thrice_the_budget(cluster: Cluster, plan: Plan | None, until_next: float, seed: int) -> Plan:
    return schedule(cluster, WORKLOAD, seed=seed, evaluations=3 * EVALUATIONS).plan


def when_forced(cluster: Cluster, plan: Plan | None, until_next: float, seed: int) -> Plan:
    if plan is not None and set(plan.nodes) <= set(cluster.ids):
        problem, draft = Problem(cluster, WORKLOAD), draft_of(plan, cluster)
        if not missing_links(problem, draft) and not memory_shortfall(problem, draft.groups, draft.cuts):
            return plan
    return with_incumbent(cluster, plan, until_next, seed)


WAYS: dict[str, Answer] = {
    "with the incumbent": with_incumbent,
    "from scratch each time": from_scratch,
    "only when forced": when_forced,
}
MORE_WAYS = WAYS | {"from scratch, with three times the evaluations": with_thrice_the_budget}


def follow(answer: Answer, events: int, seed: int) -> Outcome:
    """Goes through the events in one way. All ways start with the same plan, which costs nothing."""
    clusters = changing_cluster(events, seed)
    first = next(clusters)
    plan = schedule(first, WORKLOAD, seed=seed).plan
    training = moving = moved = planning = 0.0
    changes = 0
    iteration = simulate(Problem(first, WORKLOAD), draft_of(plan, first))
    for event, cluster in enumerate(clusters):
        began = time.process_time()
        answered = answer(cluster, plan, STEPS * iteration, event)
        planning += time.process_time() - began
        problem, draft = Problem(cluster, WORKLOAD), draft_of(answered, cluster)
        holdings = Holdings.of(problem, plan)
        fetch = holdings.fetch(draft.groups, draft.cuts)
        moving, moved = moving + fetch.seconds, moved + fetch.size
        changes += (answered.stages, answered.flows) != (plan.stages, plan.flows)
        plan = answered
        iteration = simulate(problem, draft)
        training += STEPS * iteration
    return Outcome(training, moving, moved, changes, planning)
