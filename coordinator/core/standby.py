"""State that nodes copy in advance, while others train on it: for the plan that is chosen, as spares, as neighbours."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from dtfm.coordinator.core.state import WORD_LEASES, Copying, Session, State, Stepping, Switching
from dtfm.coordinator.core.transition import Turn
from dtfm.coordinator.core.validation import shorten
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage

Layers = tuple[int, int]

FOLLOW_SHARE = 0.5
"""Of the links from a state's donors: where its steps alone would take more, it is quicker to pause for the state."""

WORD_SHARE = 0.1
"""Of a step's time, if that is more than WORD_LEASES: so long a commit may wait for the word of a copy. A run shall not lose
more than a tenth of its speed to that, unless its steps are very short; for who takes longer, backups do instead. So long the
gradients of a step may take to a neighbour, or it would be asked for copies that are late, and share the link for nothing."""

MOST_SPARES = 2
"""Of one stage: each takes a part of its replicas' uplinks."""

MOST_DONORS = 8
"""So many donors of a layer are named to who copies it: those with the fastest links."""


def keep_up(turn: Turn) -> None:
    """Has each node copy what it should, and no more (see `wanted_copies`): for the chosen plan, or to take over when a replica
    is lost. To be called when plan, choice or nodes have changed."""
    state = turn.state
    if not isinstance(state.phase, Stepping):
        return
    wanted = wanted_copies(state)
    for node in state.ready:
        session, layers = turn.state.sessions[node], wanted.get(node)
        old = _current(state, session)
        if layers is None:
            if session.copying is not None:  # even one that a plan may have ended
                turn.update(session, copying=None)
                turn.send([node], prefetch=wire.Prefetch())
        elif old is None or old.layers != layers or old.generation != state.ledger.generation:
            number = turn.state.copies + 1
            turn.set(copies=number)
            before = session.copying
            kept_up = before is not None and before.layers == layers and (before.near or before.kept_up)
            turn.update(session, copying=Copying(number, state.ledger.generation, layers, kept_up=kept_up))
            turn.send([node], prefetch=_prefetch(state, node, number, layers))


def prefetched(turn: Turn, session: Session, message: wire.Prefetched) -> None:
    """The node has copied what it was asked to, or could not."""
    copying = session.copying
    if copying is None or copying.number != message.number:
        return  # of an earlier request
    if message.problem:
        layers = f"{copying.layers[0]}-{copying.layers[1] - 1}"
        turn.log(f"{session.node} cannot copy layers {layers} in advance: {shorten(message.problem)}")
    ended = bool(message.problem)
    copying = replace(copying, near=True, ended=ended, step=message.step, voted=message.voted)
    turn.update(session, copying=replace(copying, late=copying.late and not _in_time(turn, copying)))


def word_patience(state: State) -> float:
    """For how many seconds a commit may wait for the words of copies."""
    return min(max(WORD_SHARE * (state.ledger.step_seconds or 0.0), WORD_LEASES * state.lease), state.lease)


def words_due(state: State) -> Sequence[str]:
    """Who has still to say that it has what the step in hand, voted for, will make of a stage: of each that else rests on one
    node and of which copies are kept up, one is to have it before the commit, so that no single loss takes it along."""
    plan, copies = state.ledger.plan, _kept_up(state)
    assert plan is not None
    due: list[str] = []
    for stage in plan.stages:
        keepers = copies.get(stage.layers, {}) if len(stage.replicas) == 1 else {}
        if not any(_has_next(state, copying) for copying in keepers.values()):
            due += keepers
    return due


def secured(state: State) -> bool:
    """Whether what the step in hand, voted for, will make of each stage is with somebody who is here."""
    plan, ready = state.ledger.plan, set(state.ready)
    assert plan is not None
    having = {copying.layers for copying in _copied(state).values() if _has_next(state, copying)}
    return all(stage.layers in having or not ready.isdisjoint(stage.replicas) for stage in plan.stages)


def pass_over(turn: Turn, nodes: Sequence[str]) -> None:
    """Their words did not come in time: until they do again, no commit waits for them, and what they copy counts as not kept
    up."""
    for node in nodes:
        session = turn.state.sessions[node]
        assert session.copying is not None
        turn.update(session, copying=replace(session.copying, late=True))


def awaited(state: State) -> frozenset[str]:
    """Nodes of the chosen plan that are still copying what they lack for it."""
    if state.chosen is None:
        return frozenset()
    lacking = _lacking(state, state.chosen.plan)
    copies = {node: _current(state, state.sessions[node]) for node in lacking if node in state.sessions}
    return frozenset(node for node, copying in copies.items() if copying is None or not copying.near)


def copies(state: State) -> Iterator[tuple[str, Layers]]:
    """Nodes that copied layers' state in advance, and have it as of the last commit."""
    for node in state.ready:
        copying = state.sessions[node].copying
        if copying is not None and _has(state.ledger, copying):
            yield node, copying.layers


def last_words_due(state: State) -> bool:
    """Whether a node that kept up with what nobody has any more has still to say how far it came: it does once it notices that
    its donors are gone."""
    lost = {layer for layer, who in enumerate(state.ledger.holders) if not who}
    copies = [state.sessions[node].copying for node in state.ready]
    due = [c for c in copies if c is not None and not c.ended and not _has(state.ledger, c)]
    return any((c.near or c.kept_up) and not lost.isdisjoint(range(*c.layers)) for c in due)


def count_copies(turn: Turn) -> None:
    """Where nobody has some layers' state any more, those who copied it in advance and kept up count as having it."""
    ledger = turn.state.ledger
    for node, layers in copies(turn.state):
        turn.emit(ev.StateCopied(node, ledger.members[node].incarnation, layers, ledger.step))


def _has(ledger: Ledger, copying: Copying) -> bool:
    """Whether the state as of the last commit is there, or follows from what is and from that commit."""
    last = ledger.last
    if (
        last is not None
        and last.step == ledger.step
        and (copying.step + 1, copying.voted) == (last.step, last.generation)
    ):
        return True
    return copying.near and copying.step == ledger.step


def wanted_copies(state: State) -> Mapping[str, Layers]:
    """The layers that each node should copy: what it lacks for the chosen plan; else, where it is idle, the stage with the
    fewest replicas and spares; and stages that then have but one replica are copied by neighbours, if their links allow."""
    plan = state.ledger.plan
    assert plan is not None
    wanted = _lacking(state, state.chosen.plan) if state.chosen is not None else {}
    redundancy = {stage.layers: len(stage.replicas) for stage in plan.stages}
    most = {layers: redundancy[layers] + MOST_SPARES for layers in redundancy}
    for node in state.staying:
        if node in plan.nodes or node in wanted:
            continue
        memory = state.ledger.members[node].device.memory_bytes
        fitting = [
            layers
            for layers in redundancy
            if redundancy[layers] < most[layers]
            and _memory(state, layers) <= memory
            and _can_follow(state, node, layers)
        ]
        if fitting:
            wanted[node] = min(fitting, key=lambda layers: (redundancy[layers], layers))
            redundancy[wanted[node]] += 1
    if state.chosen is None:
        for stage in plan.stages:
            if redundancy[stage.layers] == 1 and (guard := _guard(state, plan, stage, wanted)):
                wanted[guard] = stage.layers
    return wanted


def donors_at_work(state: State) -> frozenset[str]:
    """Nodes whose state others fetch for the plan that is about to begin, or copy without having caught up yet."""
    plan, holders = state.ledger.plan, state.ledger.holders
    wanted = [copying.layers for copying in _copied(state).values() if not copying.near]
    if isinstance(state.phase, Switching) and plan is not None:
        wanted += [
            stage.layers
            for stage in plan.stages
            if not all(set(who).issuperset(stage.replicas) for who in holders[slice(*stage.layers)])
        ]
    return frozenset(node for layers in wanted for who in holders[slice(*layers)] for node in who)


def rests_on_one(state: State) -> bool:
    """Whether some stage's state as of now is with one node alone: it has one replica, and nobody keeps up a copy of it in
    time."""
    plan, copies = state.ledger.plan, _kept_up(state)
    assert plan is not None
    return any(len(stage.replicas) == 1 and stage.layers not in copies for stage in plan.stages)


def _kept_up(state: State) -> Mapping[Layers, Mapping[str, Copying]]:
    """The copies that are kept up, by what they are of and by node."""
    copies: dict[Layers, dict[str, Copying]] = {}
    for node, copying in _copied(state).items():
        if copying.near and not copying.ended and not copying.late:
            copies.setdefault(copying.layers, {})[node] = copying
    return copies


def _has_next(state: State, copying: Copying) -> bool:
    """Whether the state as of the step in hand, once committed, follows from what is there."""
    return (copying.step, copying.voted) == (state.ledger.step, state.ledger.generation)


def _in_time(turn: Turn, copying: Copying) -> bool:
    """Whether a word that has just come came before the commit, or by when that would have come had it waited."""
    phase = turn.state.phase
    if not isinstance(phase, Stepping):
        return False
    return _has_next(turn.state, copying) or (turn.now <= phase.committed_by and _has(turn.state.ledger, copying))


def _guard(state: State, plan: Plan, stage: Stage, busy: Container[str]) -> str:
    """The neighbour that copies the state of ``stage`` beside its own work: the one to which its only replica has the fastest
    link, if that carries a step's gradients in WORD_SHARE of a step, and half its memory is enough; empty: there is none."""
    ledger = state.ledger
    if ledger.step_seconds is None or ledger.described is None:
        return ""
    (holder,) = stage.replicas
    size = sum(layer.parameter_bytes for layer in ledger.described.workload.layers[slice(*stage.layers)])
    least = size / (WORD_SHARE * max(ledger.step_seconds, 1e-3))
    candidates = []
    for other in plan.stages:
        for node in other.replicas:
            link = ledger.links.get(holder, {}).get(node)
            memory = 2 * (_memory(state, other.layers) + _memory(state, stage.layers))
            if node == holder or node in busy or node not in state.staying or link is None or link.bandwidth < least:
                continue
            if memory <= ledger.members[node].device.memory_bytes:
                candidates.append((-link.bandwidth, node))
    return min(candidates)[1] if candidates else ""


def _memory(state: State, layers: Layers) -> float:
    """Bytes that a holder of the layers keeps."""
    described = state.ledger.described
    assert described is not None
    size = sum(layer.parameter_bytes for layer in described.workload.layers[slice(*layers)])
    return size * described.workload.bytes_kept_per_parameter_byte


def _lacking(state: State, plan: Plan) -> dict[str, Layers]:
    """What the nodes of ``plan`` must have and have not, where they have memory for it beside what they train now, and can copy
    it while others train on it."""
    holders, current = state.ledger.holders, state.ledger.plan
    assert current is not None
    trained = {node: _memory(state, stage.layers) for stage in current.stages for node in stage.replicas}
    return {
        node: stage.layers
        for stage in plan.stages
        for node in stage.replicas
        if holders
        and any(node not in holders[layer] for layer in range(*stage.layers))
        and trained.get(node, 0) + _memory(state, stage.layers) <= state.ledger.members[node].device.memory_bytes
        and _can_follow(state, node, stage.layers)
    }


def _can_follow(state: State, node: str, layers: Layers) -> bool:
    """Whether the links from the donors carry the gradients of a step in FOLLOW_SHARE of the time that a step takes; so it is
    taken to be while that is not known."""
    ledger = state.ledger
    if not ledger.step_seconds or not ledger.holders or ledger.described is None:
        return True
    sizes: dict[tuple[str, ...], float] = {}
    for layer in range(*layers):
        donors = ledger.holders[layer]
        if node not in donors:
            sizes[donors] = sizes.get(donors, 0.0) + ledger.described.workload.layers[layer].parameter_bytes
    for donors, size in sizes.items():
        known = [ledger.links[donor][node].bandwidth for donor in donors if node in ledger.links.get(donor, {})]
        if known and size > FOLLOW_SHARE * ledger.step_seconds * sum(known):
            return False
    return True


def _copied(state: State) -> Mapping[str, Copying]:
    """What nodes copy, by node."""
    copies = {node: _current(state, state.sessions[node]) for node in state.ready}
    return {node: copying for node, copying in copies.items() if copying is not None}


def _current(state: State, session: Session) -> Copying | None:
    """What the node copies, unless the plan that came since, in which it has a part, has ended that."""
    copying, plan = session.copying, state.ledger.plan
    if copying is None or plan is None:
        return None
    ended = copying.generation != state.ledger.generation and session.node in plan.nodes
    return None if ended else copying


def _prefetch(state: State, node: str, number: int, layers: Layers) -> wire.Prefetch:
    holders = state.ledger.holders
    donors = [_fastest(state, node, holders[layer]) if layer >= layers[0] else () for layer in range(layers[1])]
    members = state.ledger.members
    return wire.Prefetch(
        number=number,
        first_layer=layers[0],
        past_last_layer=layers[1],
        donors=[wire.Assignment.Donors(nodes=names) for names in donors],
        peers=[
            wire.Peer(node=name, address=members[name].address)
            for name in sorted({name for names in donors for name in names})
        ],
    )


def _fastest(state: State, node: str, donors: Sequence[str]) -> Sequence[str]:
    def bandwidth(donor: str) -> float:
        link = state.ledger.links.get(donor, {}).get(node)
        return link.bandwidth if link is not None else 0.0

    return sorted((donor for donor in donors if donor != node), key=lambda donor: (-bandwidth(donor), donor))[
        :MOST_DONORS
    ]
