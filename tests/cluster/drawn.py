"""The coordinator's command where the first letter of a node's name says its island: ``python -m tests.cluster.drawn serve ...``.

Otherwise as alike.py: the islands' plans and shares are drawn for nodes and links that are all equal. Where all names of an
island have an r in them, its nodes are replicas of one stage; where all have a p, they are two stages. Rounds that are left to
the planner have 3 steps, if there are several islands, and begin at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtfm.coordinator import cli
from dtfm.coordinator.core.plan import steep_start
from dtfm.coordinator.service.planning import planner
from dtfm.scheduler.islands import layout, within_round
from dtfm.scheduler.islands.advice import Advice
from dtfm.scheduler.islands.partition import Partition
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision
from dtfm.scheduler.schedule import schedule
from tests.cluster.alike import alike


def by_letter(cluster: Cluster, _: Callable[[tuple[int, ...]], bool]) -> list[Partition]:
    letters = sorted({name[0] for name in cluster.ids})
    return [tuple(tuple(n for n, name in enumerate(cluster.ids) if name[0] == letter) for letter in letters)]


def main() -> None:
    lay_out, grown = layout.lay_out, within_round.grown

    def drawn(cluster: Cluster, *arguments: Any, **options: Any) -> Decision:
        return lay_out(alike(cluster), *arguments, **{**options, "population": ()})

    def replicated(cluster: Cluster, *arguments: Any, **options: Any) -> Decision:
        stages = next((n for n, letter in ((1, "r"), (2, "p")) if all(letter in name for name in cluster.ids)), None)
        return schedule(cluster, *arguments, **{**options, "stages": stages})

    def soon(cluster: Cluster, *arguments: Any, **options: Any) -> within_round.Grown | None:
        return grown(alike(cluster), *arguments, **options)

    def advised(cluster: Cluster, *_: Any, **__: Any) -> Advice | None:
        islands = len({name[0] for name in cluster.ids})
        return Advice(rounds=3, islands=islands, speedup=2.0) if islands > 1 else None

    def advised_of(decision: Decision, length: int, *_: Any) -> Advice:
        return Advice(length, len(decision.plan.islands), speedup=2.0)

    vars(layout).update(lay_out=drawn, partitions=by_letter, schedule=replicated)
    vars(within_round).update(partitions=by_letter, schedule=replicated)
    vars(planner).update(advice=advised, advice_of=advised_of, grown=soon)
    vars(steep_start).update(fall_of=lambda losses: steep_start.Fall(0.0))
    cli.main()


if __name__ == "__main__":
    main()
