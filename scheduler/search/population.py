"""The layouts that the search keeps: their names, and who of them survives."""

from __future__ import annotations

from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.population import Island, Member, Population
from dtfm.scheduler.model.problem import Groups

__all__ = ["Island", "Member", "Population", "named"]


def named(cluster: Cluster, groups: Groups, cuts: tuple[int, ...]) -> Member:
    """The member with these groups and cuts, which has one island."""
    ids = cluster.ids
    return Member((Island(tuple(tuple(ids[node] for node in group) for group in groups), cuts),))
