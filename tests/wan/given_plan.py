"""The coordinator's command with a planner that can be told a plan: ``python -m tests.wan.given_plan FILE serve ...``.

FILE is JSON, {"groups": [["n0", "n3"], ...], "cuts": [0, 4, ...]}: the nodes of each stage, and where the model is cut. Loads and
flows follow as in the scheduler's own plans. While there is no FILE, the scheduler searches. `dtfm-coordinator plan-now` has the
coordinator ask again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dtfm.coordinator import cli
from dtfm.coordinator.service.planning import planner
from dtfm.scheduler.assemble.evaluate import Evaluator
from dtfm.scheduler.assemble.infeasible import shortfall
from dtfm.scheduler.cost.in_flight import depths
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible, Predicted, Reason
from dtfm.scheduler.model.keeping import keepings
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.replan.switch import Before
from dtfm.scheduler.schedule import schedule


@dataclass(frozen=True, slots=True)
class Given:
    """Who is in which stage, and cuts [0, ..., layers]."""

    groups: tuple[tuple[str, ...], ...]
    cuts: tuple[int, ...]

    def write(self, path: Path) -> None:
        """At once: the coordinator reads it whenever it plans."""
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(asdict(self)))
        beside.replace(path)


def read(path: Path) -> Given | None:
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return Given(tuple(tuple(group) for group in found["groups"]), tuple(found["cuts"]))


def decision(
    cluster: Cluster, workload: Workload, given: Given, incumbent: Plan | None, generation: int, overhead: float
) -> Decision:
    """The scheduler's plan for these groups and cuts, instead of the ``incumbent``. Raises Infeasible."""
    problem = Problem(cluster, workload)
    groups = tuple(tuple(cluster.ids.index(node) for node in group) for group in given.groups)
    found = Evaluator(problem, keep_idle_hands=False).simulated(groups, given.cuts)
    if not found.feasible:
        raise Infeasible(shortfall(problem, found))
    plan = found.draft.plan(cluster, depths(problem, found.draft), keepings(problem, found.draft), generation)
    if incumbent is not None:
        freeing = Before.of(problem, incumbent).freeing(plan)
        plan = replace(plan, frees_first=tuple(cluster.ids[each.node] for each in freeing))
    return Decision(plan, Predicted(found.seconds + overhead, 0.0), 0.0, Reason.REQUESTED, "This plan was given.", 1)


def main() -> None:
    path = Path(sys.argv.pop(1))

    def plan(cluster: Cluster, workload: Workload, incumbent: Plan | None = None, **options: Any) -> Decision:
        given = read(path)
        if given is None:
            return schedule(cluster, workload, incumbent, **options)
        return decision(cluster, workload, given, incumbent, options["generation"], options["overhead"])

    vars(planner)["schedule"] = plan
    cli.main()


if __name__ == "__main__":
    main()
