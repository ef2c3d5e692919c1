"""The standbys that keep up with the steps: the commits that wait for them, and what they would save."""

from __future__ import annotations

from collections.abc import Mapping

from dtfm.coordinator.core.copies.availability import (
    availability,
    standbys_of,
    step_of,
)
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.state.copies import Layers, Standby
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import COMMIT_WAIT_LEASES
from dtfm.coordinator.log.ledger import Ledger
from dtfm.scheduler.model.plan import Stage

COMMIT_WAIT_FRACTION = 0.1
"""The fraction of a step that a commit may wait for a standby, if that is more than COMMIT_WAIT_LEASES. The run loses at most
that much of its speed. A neighbour becomes a standby only if a step's gradients reach it within this time. Stages with slower
standbys are safe in snapshots on disks."""


def commit_patience(state: State) -> float:
    """The seconds that a commit may wait for standbys."""
    step_seconds = state.ledger.training.step_seconds or 0.0
    return min(max(COMMIT_WAIT_FRACTION * step_seconds, COMMIT_WAIT_LEASES * state.lease), state.lease)


def commit_waits_for(state: State) -> frozenset[str]:
    """The standbys that a commit waits for, once all have voted. For each stage whose new state only one machine would have,
    these are the standbys that have kept up; one of them is enough. In an exchange, they are the standbys for the next plan."""
    if state.rounds.exchanges(state.ledger.training.step + 1):
        return joining(state, state.ledger.training.step + 1)
    standbys = _by_layers(state)
    waits_for: set[str] = set()
    for stage in state.ledger.training.in_force.stages:
        of_stage = standbys.get(stage.layers, {})
        with_next_step, kept_up = _with_next_step(state, of_stage), keeping_up(state, of_stage)
        if not (useful := _outliving(state.ledger, stage, with_next_step | kept_up)) & with_next_step:
            waits_for |= useful & kept_up
    return frozenset(waits_for)


def next_step_survives(state: State) -> bool:
    """Whether a connected node would have each stage's new state if the current step were committed."""
    ready, standbys = set(state.ledger.ready), _by_layers(state)
    return all(
        not ready.isdisjoint(stage.replicas) or _with_next_step(state, standbys.get(stage.layers, {}))
        for stage in state.ledger.training.in_force.stages
    )


def rests_on_one_machine(state: State) -> bool:
    """Whether some stage's state is on one machine alone: all its replicas are there, and no standby elsewhere keeps up. False
    with several islands, since each of them has the weights."""
    party, standbys = state.ledger.party, _by_layers(state)
    return len(state.ledger.training.in_force.islands) == 1 and any(
        len(set(map(party, keeping_up(state, standbys.get(stage.layers, {})).union(stage.replicas)))) == 1
        for stage in state.ledger.training.in_force.stages
    )


def last_reports_awaited(state: State) -> frozenset[str]:
    """The standbys of lost state that have not yet reported their last step. They report when they notice that their donors are
    gone."""
    ledger = state.ledger
    lost = {layer for layer, nodes in enumerate(availability(state).in_memory(ledger.training.step)) if not nodes}
    return frozenset(
        node
        for node in ledger.ready
        if (standby := state.members.sessions[node].standby) is not None
        and not standby.ended
        and (standby.caught_up is not None or standby.caught_up_before)
        and step_of(standby, state) != ledger.training.step
        and not lost.isdisjoint(range(*standby.layers))
    )


def joining(state: State, step: int, *, within_round: bool = False) -> frozenset[str]:
    """With rounds: the nodes of the chosen plan that copy its state, and do not have the sum of the exchange ``step`` yet. If
    they may begin ``within_round``, and the step is no exchange: that do not have the state of the last exchange yet."""
    chosen = state.planner.chosen
    if chosen is None:
        return frozenset()
    generation, before = state.ledger.training.generation, state.rounds.rested(step - 1)

    def has(standby: Standby) -> bool:
        if within_round and not state.rounds.at_rest(step):
            return standby.caught_up is not None and standby.step == before
        return (standby.step, standby.voted) == (before, generation)

    return frozenset(
        node
        for node, standby in standbys_of(state).items()
        if node in chosen.plan.nodes and not standby.ended and not has(standby)
    )


def _by_layers(state: State) -> Mapping[Layers, Mapping[str, Standby]]:
    """`standbys_of`, by the layers that they copy."""
    made: dict[Layers, dict[str, Standby]] = {}
    for node, standby in standbys_of(state).items():
        made.setdefault(standby.layers, {})[node] = standby
    return made


def _outliving(ledger: Ledger, stage: Stage, standbys: frozenset[str]) -> frozenset[str]:
    """The ``standbys`` that keep the state of ``stage`` if its only machine is lost. If there is none, the standbys that keep it
    if its only replica is lost. Empty if its replicas are on several machines."""
    here = set(map(ledger.party, stage.replicas))
    if len(here) > 1:
        return frozenset()
    elsewhere = frozenset(node for node in standbys if ledger.party(node) not in here)
    return elsewhere or (standbys if len(stage.replicas) == 1 else frozenset())


def keeping_up(state: State, standbys: Mapping[str, Standby]) -> frozenset[str]:
    """The ``standbys`` that were in time with the last step: they reported it before its commit, or before its commit was due. A
    standby that has just caught up is in time."""
    return frozenset(
        node
        for node, standby in standbys.items()
        if standby.caught_up is not None
        and not standby.ended
        and step_of(standby, state) == state.ledger.training.step
        and (standby.caught_up == state.ledger.training.step or _was_in_time(state, standby))
    )


def _with_next_step(state: State, standbys: Mapping[str, Standby]) -> frozenset[str]:
    """The ``standbys`` that have the gradients of the current step, as voted in this generation."""
    next_step = (state.ledger.training.step, state.ledger.training.generation)
    return frozenset(node for node, standby in standbys.items() if (standby.step, standby.voted) == next_step)


def _was_in_time(state: State, standby: Standby) -> bool:
    """Whether the standby reported the last committed step before its commit was due."""
    phase = state.phase
    if not isinstance(phase, Stepping):
        return False
    committed_by = phase.committed_by if phase.step > state.ledger.training.step else phase.commit_by
    return committed_by is not None and standby.reported <= committed_by
