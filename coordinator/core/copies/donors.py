"""Donors: the nodes from which others copy state, and which of them are busy with that."""

from __future__ import annotations

from collections.abc import Sequence

from dtfm.coordinator.core.copies.availability import standbys_of
from dtfm.coordinator.core.givers import believed
from dtfm.coordinator.core.phases import Switching
from dtfm.coordinator.core.state import State

MOST_DONORS = 8
"""The number of donors that a standby is named for each layer: those with the fastest links to it."""


def fastest_donors(state: State, node: str, holders: Sequence[str]) -> tuple[str, ...]:
    """Of a layer's ``holders``, without ``node`` itself and those that it should not believe: those with the fastest links to it,
    the fastest first."""

    def bandwidth(donor: str) -> float:
        link = state.ledger.reach.links.get(donor, {}).get(node)
        return link.bandwidth if link is not None else 0.0

    others = [holder for holder in believed(state.ledger, node, holders) if holder != node]
    return tuple(sorted(others, key=lambda donor: (-bandwidth(donor), donor))[:MOST_DONORS])


def donors_at_work(state: State) -> frozenset[str]:
    """Nodes whose state others fetch for the plan that is about to begin, or copy without having caught up yet."""
    plan, holders = state.ledger.training.plan, state.ledger.holders
    wanted = [standby.layers for standby in standbys_of(state).values() if standby.caught_up is None]
    if isinstance(state.phase, Switching) and plan is not None:
        wanted += [
            stage.layers
            for stage in plan.stages
            if not all(set(nodes).issuperset(stage.replicas) for nodes in holders[slice(*stage.layers)])
        ]
    return frozenset(node for layers in wanted for nodes in holders[slice(*layers)] for node in nodes)
