"""Standbys: nodes that copy state while others train it, and keep the copy up to date. A node becomes a standby to prepare for
the chosen plan, or to take over if a replica is lost. Where a stage is on only one machine, a node may be its standby beside
its own work. Like learners in Raft, standbys do not vote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest

from dtfm.coordinator.core.copies.availability import (
    availability,
    fastest_donors,
    frozen_bytes,
    parameter_bytes,
    standby_of,
    standbys_of,
    step_of,
)
from dtfm.coordinator.core.givers import Givers
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.refusal import shorten
from dtfm.coordinator.core.state import Arrangement, Layers, Session, Standby, State
from dtfm.coordinator.core.timeouts import COMMIT_WAIT_LEASES, GRACE_LEASES
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.memory import Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan, Stage

FOLLOW_FRACTION = 0.5
"""A node becomes a standby only if its links from the donors carry a step's gradients in this fraction of a step. Over slower
links it is quicker to pause training for the state."""

UPDATE = {"auto": 0.15, "i4b64": 0.15, "raw16": 0.5, "topk": 1 / 16}
"""By codec of exchanges, the bytes to a standby per byte of the exchange's sum (node/state/update.py). Under topk, which keeps 8
of 256 elements with their places, these are the bytes for each island."""

COMMIT_WAIT_FRACTION = 0.1
"""The fraction of a step that a commit may wait for a standby, if that is more than COMMIT_WAIT_LEASES. The run loses at most
that much of its speed. A neighbour becomes a standby only if a step's gradients reach it within this time. Stages with slower
standbys are safe in snapshots on disks."""

MOST_IDLE_STANDBYS = 2
"""The number of idle nodes that become standbys of one stage. Each takes a part of its replicas' uplinks."""


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
    joining = _lacking(state, state.planner.chosen.plan) if state.planner.chosen is not None else {}
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


def commit_patience(state: State) -> float:
    """The seconds that a commit may wait for standbys."""
    step_seconds = state.ledger.training.step_seconds or 0.0
    return min(max(COMMIT_WAIT_FRACTION * step_seconds, COMMIT_WAIT_LEASES * state.lease), state.lease)


def commit_waits_for(state: State) -> frozenset[str]:
    """The standbys that a commit waits for, once all have voted. For each stage whose new state only one machine would have,
    these are the standbys that have kept up; one of them is enough. In an exchange, they are the standbys for the next plan."""
    if state.rounds.exchanges(state.ledger.training.step + 1):
        return _joining(state, state.ledger.training.step + 1)
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


def still_copying(state: State) -> frozenset[str]:
    """Nodes of the chosen plan that have not caught up yet with the state that the plan gives them."""
    chosen, arranged = state.planner.chosen, state.safekeeping.arranged
    if chosen is None:
        return frozenset()
    if arranged is None or arranged.chosen is not chosen:  # the nodes are about to be asked
        return frozenset(_lacking(state, chosen.plan))
    if state.rounds.count:
        return _joining(state, state.ledger.training.step)
    wanted = {node: stage.layers for stage in chosen.plan.stages for node in stage.replicas}
    return frozenset(
        node
        for node, standby in standbys_of(state).items()
        if standby.layers == wanted.get(node) and standby.caught_up is None
    )


def _joining(state: State, step: int) -> frozenset[str]:
    """With rounds: the nodes of the chosen plan that copy its state, and do not have the sum of the exchange ``step`` yet."""
    chosen = state.planner.chosen
    if chosen is None:
        return frozenset()
    generation, before = state.ledger.training.generation, state.rounds.rested(step - 1)
    return frozenset(
        node
        for node, standby in standbys_of(state).items()
        if node in chosen.plan.nodes and not standby.ended and (standby.step, standby.voted) != (before, generation)
    )


def promote(transition: Transition) -> None:
    """Counts standbys that have the state as of the last commit as holders of it from now on."""
    ledger = transition.state.ledger
    for node in ledger.ready:
        standby = transition.state.members.sessions[node].standby
        if standby is not None and standby.is_of_all and step_of(standby, transition.state) == ledger.training.step:
            process = ledger.members[node].incarnation
            transition.emit(ev.StandbyPromoted(node, process, standby.layers, ledger.training.step))


def wanted_standbys(state: State) -> Mapping[str, Layers]:
    """By node, the layers that it should copy as a standby.

    A node of the chosen plan copies the layers that it lacks. An idle node copies the stage whose replicas and standbys are on
    the fewest machines, preferably a stage that is not on its own machine. If a stage is still on one machine alone, a neighbour
    whose link is fast enough copies it."""
    plan, chosen = state.ledger.training.in_force, state.planner.chosen
    wanted = _lacking(state, chosen.plan) if chosen is not None else {}
    if state.rounds.count:
        return wanted  # islands are copies of each other as of the last exchange, and no standby follows their steps
    party, holders = state.ledger.party, state.ledger.holders
    copies = {stage.layers: list(stage.replicas) for stage in plan.stages}
    most = {layers: len(replicas) + MOST_IDLE_STANDBYS for layers, replicas in copies.items()}
    on = {layers: set(map(party, replicas)) for layers, replicas in copies.items()}
    staying, trained = state.ledger.staying, {node: stage for stage in plan.stages for node in stage.replicas}
    for node in staying:
        if node in trained or node in wanted:
            continue
        at = party(node)
        order = sorted(
            (at in on[layers], len(on[layers]), len(copies[layers]), layers)
            for layers in copies
            if len(copies[layers]) < most[layers]
        )
        for *_, layers in order:
            if _has_room(state, node, layers, None) and _can_follow(state, holders, node, layers):
                wanted[node] = layers
                copies[layers].append(node)
                on[layers].add(at)
                break
    if chosen is None:
        free = {node: trained[node] for node in staying if node in trained and node not in wanted}
        for stage in plan.stages:
            if len(on[stage.layers]) == 1 and (neighbour := _neighbour(state, stage, free)):
                wanted[neighbour] = stage.layers
                del free[neighbour]
    return wanted


def _by_layers(state: State) -> Mapping[Layers, Mapping[str, Standby]]:
    """`standbys_of`, by the layers that they copy."""
    made: dict[Layers, dict[str, Standby]] = {}
    for node, standby in standbys_of(state).items():
        made.setdefault(standby.layers, {})[node] = standby
    return made


def _outliving(ledger: Ledger, stage: Stage, standbys: frozenset[str]) -> frozenset[str]:
    """The ``standbys`` that would keep the state of ``stage`` if its only machine were lost. If none would: those that would keep
    it if its only replica were lost. Empty if its replicas are on several machines."""
    here = set(map(ledger.party, stage.replicas))
    if len(here) > 1:
        return frozenset()
    elsewhere = frozenset(node for node in standbys if ledger.party(node) not in here)
    return elsewhere or (standbys if len(stage.replicas) == 1 else frozenset())


def keeping_up(state: State, standbys: Mapping[str, Standby]) -> frozenset[str]:
    """The ``standbys`` that were in time with the last step: they reported it before it was committed, or before the latest time
    at which it could have been committed. A standby that has just caught up is in time."""
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


def _neighbour(state: State, stage: Stage, free: Mapping[str, Stage]) -> str:
    """The node that becomes a standby of ``stage`` beside its own work; empty: there is none. The stage's replicas are on one
    machine.

    Of the nodes on other machines, picks the one with the fastest link from a replica. The link must carry a step's gradients in
    COMMIT_WAIT_FRACTION of a step, and half the node's memory must be enough for both. If there is no such node, a single replica
    may have its standby on its own machine. ``free``: the nodes that are no standbys yet, with the stages that they train.
    """
    ledger = state.ledger
    if ledger.training.step_seconds is None:
        return ""
    here = set(map(ledger.party, stage.replicas))
    slowest = parameter_bytes(state, stage.layers) / (COMMIT_WAIT_FRACTION * max(ledger.training.step_seconds, 1e-3))
    fastest: dict[str, float] = {}
    for replica in stage.replicas:
        for node, link in ledger.reach.links.get(replica, {}).items():
            if link.bandwidth >= slowest and node in free:
                fastest[node] = max(link.bandwidth, fastest.get(node, 0.0))
    candidates = []
    for node, bandwidth in fastest.items():
        beside = ledger.party(node) in here
        if free[node] is not stage and not (beside and len(stage.replicas) > 1):
            candidates.append((beside, -bandwidth, node))
    return next(
        (node for *_, node in sorted(candidates) if _has_room(state, node, stage.layers, free[node], fraction=0.5)), ""
    )


def _has_room(state: State, node: str, layers: Layers, trained: Stage | None, fraction: float = 1.0) -> bool:
    """Whether this fraction of the node's memory is enough for a copy of the layers beside the stage that it trains.

    Copies lie in the host's memory. If the device has its own memory, the copy lies beside the stage's state only if that is in
    the host's memory as well. The device of an idle node must have room too, at least for the state alone, since the node is to
    train the copy.
    """
    workload, size = state.ledger.description.workload, parameter_bytes(state, layers)
    workload, device = workload.with_rounds() if state.rounds.count else workload, state.ledger.members[node].device
    own = 0.0 if trained is None else parameter_bytes(state, trained.layers)
    frozen = frozen_bytes(state, layers)
    outer = workload.for_exchanges_per_parameter_byte
    if device.host_memory_bytes == 0:
        frozen += 0.0 if trained is None else frozen_bytes(state, trained.layers)
        needed = (own + size) * (workload.bytes_kept_per_parameter_byte + outer) + frozen
        return needed <= fraction * device.memory_bytes
    if trained is None and size * workload.least_device_bytes_per_parameter_byte + frozen > device.memory_bytes:
        return False
    keeping = trained.keeping[trained.replicas.index(node)] if trained is not None and trained.keeping else Keeping()
    own *= outer if keeping.optimizer_state is OptimizerState.DEVICE else workload.host_bytes_per_parameter_byte
    return own + size * _copied_per_parameter_byte(state) <= fraction * device.host_memory_bytes


def _copied_per_parameter_byte(state: State) -> float:
    """The bytes that a standby copies per parameter byte. With rounds it copies only the state that islands share."""
    workload = state.ledger.description.workload
    return workload.bytes_shared_per_parameter_byte if state.rounds.count else workload.bytes_moved_per_parameter_byte


def _lacking(state: State, plan: Plan) -> dict[str, Layers]:
    """By node, the layers that ``plan`` gives it, if it does not hold them and can copy them while others train.

    To copy them, it needs memory for them beside its present layers, and links that keep up. Nodes in Plan.frees_first do not
    have the memory. With rounds, only nodes of new islands copy: a replica in an island that goes on needs its moments, too."""
    holders, current = state.ledger.holders_in(None), state.ledger.training.in_force
    going_on = {stage.island for stage in current.stages} if state.rounds.count else ()
    trained = {node: stage for stage in current.stages for node in stage.replicas}
    return {
        node: stage.layers
        for stage in plan.stages
        for node in stage.replicas
        if holders
        and stage.island not in going_on
        and node not in plan.frees_first
        and any(node not in holders[layer] for layer in range(*stage.layers))
        and _has_room(state, node, stage.layers, trained.get(node))
        and _can_follow(state, holders, node, stage.layers)
    }


def _can_follow(state: State, holders: Sequence[tuple[str, ...]], node: str, layers: Layers) -> bool:
    """Whether the links from the donors carry a step's gradients in FOLLOW_FRACTION of a step, or an exchange's sum in this
    fraction of a round. True if that is not known. ``holders``: by layer, see Ledger, which looks at every member."""
    ledger, rounds = state.ledger, state.rounds
    share = FOLLOW_FRACTION * (rounds.length + 1)
    if rounds.count and (islands := len({*ledger.training.islands.values()})) > 1:
        codec = state.run.network.exchange
        share /= min(1.0, UPDATE.get(codec, 1.0) * (islands if codec == "topk" else 1))
    if not ledger.training.step_seconds or not holders:
        return True
    sizes: dict[tuple[str, ...], float] = {}
    for layer in range(*layers):
        donors = holders[layer]
        if node not in donors:
            sizes[donors] = sizes.get(donors, 0.0) + parameter_bytes(state, (layer, layer + 1))
    for donors, size in sizes.items():
        known = [
            ledger.reach.links[donor][node].bandwidth for donor in donors if node in ledger.reach.links.get(donor, {})
        ]
        if known and size > share * ledger.training.step_seconds * sum(known):
            return False
    return True


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
    size = parameter_bytes(state, layers) * _copied_per_parameter_byte(state)
    return max(GRACE_LEASES * state.lease if joins else state.patience, 10 * size / max([1.0, *rates]))


def _request(state: State, number: int, layers: Layers, donors: Givers) -> wire.Standby:
    members, training = state.ledger.members, state.ledger.training
    return wire.Standby(
        rounds=asdict(state.rounds),
        trained_before=training.trained(training.moments_began(training.in_force.stages[0].island)),
        number=number,
        first_layer=layers[0],
        past_last_layer=layers[1],
        donors=[wire.Assignment.Donors(nodes=names) for names in donors],
        peers=[
            wire.Peer(node=name, candidates=members[name].candidates)
            for name in sorted({name for names in donors for name in names})
        ],
    )
