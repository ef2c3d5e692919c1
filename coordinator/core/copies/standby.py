"""Standbys: nodes that copy state while others train it, and keep the copy up to date. A node becomes a standby to prepare for
the chosen plan, or to take over if a replica is lost. Where a stage is on only one machine, a node may be its standby beside
its own work. Like learners in Raft, standbys do not vote."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from dtfm.coordinator.core.copies.availability import (
    fastest_donors,
    standby_of,
    standbys_of,
    step_of,
)
from dtfm.coordinator.core.copies.frozen_layers import offered
from dtfm.coordinator.core.copies.keeping_up import joining
from dtfm.coordinator.core.copies.wanted_standbys import copied_bytes, lacking, wanted_standbys
from dtfm.coordinator.core.givers import Givers
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.refusal import shorten
from dtfm.coordinator.core.state.copies import Arrangement, Layers, Standby
from dtfm.coordinator.core.state.session import Session
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire, plan_pb2


def arrange(transition: Transition) -> None:
    """Asks each node to become the standby that `wanted_standbys` names, when its inputs have changed."""
    state = transition.state
    if state.stopped or not isinstance(state.phase, Stepping):
        return
    ledger, last = state.ledger, state.ledger.training.last
    timed = last is not None and last.generation == ledger.training.generation and not last.resumed
    arrangement = Arrangement(ledger.training.generation, timed, state.planner.chosen, ledger.ready, ledger.staying)
    if arrangement == state.safekeeping.arranged:
        return
    transition.set_safekeeping(replace(state.safekeeping, arranged=arrangement))
    wanted = wanted_standbys(state)
    joining = lacking(state, state.planner.chosen.plan) if state.planner.chosen is not None else {}
    for node in ledger.ready:
        session, layers = transition.state.members.sessions[node], wanted.get(node)
        current, before = standby_of(state, session), session.standby
        if layers is None:
            if before is not None:
                transition.set_session(replace(session, standby=None))
                transition.send([node], wire.CoordinatorMessage(standby=wire.Standby()))
        elif current is None or current.layers != layers or current.generation != ledger.training.generation:
            number = transition.state.safekeeping.standby_number + 1
            transition.set_safekeeping(replace(transition.state.safekeeping, standby_number=number))
            same = before if before is not None and before.layers == layers else None
            caught_up_before = same is not None and (same.caught_up is not None or same.caught_up_before)
            named = _named(state, node, layers)
            due = transition.now + _copy_patience(state, node, layers, named, joins=node in joining)
            standby = Standby(
                number,
                ledger.training.generation,
                layers,
                caught_up_before=caught_up_before,
                due=due,
                rounds=state.rounds,
            )
            # The node keeps what it has copied from donors named earlier, if a donor named now continues that copy.
            before_it = session.copies_from if same is not None else ()
            both = zip_longest(named, before_it, fillvalue=())
            may_have = tuple(tuple(sorted({*now, *then})) for now, then in both)
            transition.set_session(replace(session, standby=standby, copies_from=may_have))
            transition.send([node], wire.CoordinatorMessage(standby=_request(state, number, layers, named)))


def reported(transition: Transition, session: Session, report: wire.StandbyProgress) -> None:
    """A standby has caught up with a step, or cannot go on."""
    standby = session.standby
    if standby is None or standby.number != report.number:
        return  # the report answers an earlier request
    if report.problem:
        layers = f"{standby.layers[0]}-{standby.layers[1] - 1}"
        transition.log(f"{session.node} cannot be a standby of layers {layers}: {shorten(report.problem)}")
    following = standby.rounds.next_rest(standby.step)
    has_applied = standby.voted and (report.step, report.voted) == (following, 0)  # the gradients that it had before
    standby = replace(
        standby,
        caught_up=transition.state.ledger.training.step if standby.caught_up is None else standby.caught_up,
        step=report.step,
        voted=report.voted,
        reported=standby.reported if has_applied else transition.now,
        ended=bool(report.problem),
    )
    transition.set_session(replace(session, standby=standby))


def end_overdue(transition: Transition) -> None:
    """Stops waiting for nodes that should have caught up by now, though their heartbeats come."""
    for session in transition.state.members.sessions.values():
        if (standby := session.standby) is not None and standby.caught_up is None and transition.now > standby.due:
            late = wire.StandbyProgress(number=standby.number, problem="it does not say that it has caught up")
            reported(transition, session, late)


def still_copying(state: State) -> frozenset[str]:
    """Nodes of the chosen plan that have not caught up yet with the state that the plan gives them."""
    chosen, arranged = state.planner.chosen, state.safekeeping.arranged
    if chosen is None:
        return frozenset()
    if arranged is None or arranged.chosen is not chosen:  # the nodes are about to be asked
        return frozenset(lacking(state, chosen.plan))
    if state.rounds.count:
        return joining(state, state.ledger.training.step, within_round=chosen.within_round)
    wanted = {node: stage.layers for stage in chosen.plan.stages for node in stage.replicas}
    return frozenset(
        node
        for node, standby in standbys_of(state).items()
        if standby.layers == wanted.get(node) and standby.caught_up is None
    )


def promote(transition: Transition) -> None:
    """Counts standbys that have the state as of the last commit as holders of it from now on."""
    ledger = transition.state.ledger
    for node in ledger.ready:
        standby = transition.state.members.sessions[node].standby
        if standby is not None and standby.is_of_all and step_of(standby, transition.state) == ledger.training.step:
            process = ledger.members[node].incarnation
            transition.emit(ev.StandbyPromoted(node, process, standby.layers, ledger.training.step))


def _named(state: State, node: str, layers: Layers) -> Givers:
    """By layer, the donors of a standby."""
    holders = state.ledger.holders_in(None)
    return tuple(
        fastest_donors(state, node, holders[layer]) if layer >= layers[0] else () for layer in range(layers[1])
    )


def _copy_patience(state: State, node: str, layers: Layers, donors: Givers, *, joins: bool) -> float:
    """The seconds that a node may take to copy the layers, even over links ten times slower than measured. If the node
    ``joins`` the chosen plan, that plan waits for it; a node too slow for short steps gets the rest in a pause."""
    links, named = state.ledger.reach.links, {name for names in donors for name in names}
    rates = [link.bandwidth for name in named if (link := links.get(name, {}).get(node)) is not None]
    size = copied_bytes(state, layers)
    return max(GRACE_LEASES * state.lease if joins else state.patience, 10 * size / max([1.0, *rates]))


def _request(state: State, number: int, layers: Layers, donors: Givers) -> wire.Standby:
    members, training, of = state.ledger.members, state.ledger.training, state.rounds
    frozen = [*offered(state, *layers)]
    giving = {name for names in donors for name in names} | {name for each in frozen for name in each.nodes}
    return wire.Standby(
        rounds=plan_pb2.Rounds(  # what a copy needs of them: when it follows an exchange, and how AdamW counts
            since=of.since, steps=of.steps, count=of.count, before=of.before, restarts=of.restarts
        ),
        trained_before=training.trained(training.moments_began(training.in_force.stages[0].island)),
        number=number,
        first_layer=layers[0],
        past_last_layer=layers[1],
        donors=[wire.Assignment.Donors(nodes=names) for names in donors],
        peers=[wire.Peer(node=name, candidates=members[name].candidates) for name in sorted(giving & members.keys())],
        frozen=frozen,
    )
