"""Why there is no plan for now, as the coordinator says it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.refusal import name_some
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.wording import MOST_NAMED


class WaitReason(enum.Enum):
    """Why there is nothing to ask and nothing to adopt."""

    TOO_FEW_NODES = enum.auto()
    NODES_MAY_RETURN = enum.auto()
    """Training would go back otherwise, which costs more than waiting."""
    STATE_IS_LOST = enum.auto()
    """Training would go back otherwise, which costs so much that an operator has to decide."""
    STANDBYS_MAY_REPORT = enum.auto()
    """A standby has not yet said whether it has state that no other node has."""
    NO_PLAN = enum.auto()
    """The planner found no plan for these nodes."""
    PAUSED = enum.auto()
    """An operator has paused the run."""
    PLANNING = enum.auto()
    """The planner is at work."""
    SWITCHING = enum.auto()
    """A plan is chosen, and is adopted at the next step after which all islands agree. Or it is adopted, and does not train
    yet."""
    EVERYBODY_LEAVES = enum.auto()
    PLAN_IS_BEST = enum.auto()
    """The planner has looked since the last change."""


@dataclass(frozen=True, slots=True)
class Wait:
    reason: WaitReason
    sentence: str


def too_few(state: State, phase: Gathering, now: float) -> str:
    """Why planning makes no sense yet; empty: it makes sense."""
    cluster, ready = state.run.cluster, len(state.ledger.staying)
    pinned = cluster.pinned
    least = len(pinned) if isinstance(pinned, tuple) else pinned or 1
    waited = bool(state.ledger.training.generation) and now - phase.since >= GRACE_LEASES * state.lease
    if not state.planner.has_planned and not waited:
        least = cluster.nodes
    if ready >= least:
        return ""
    undescribed = state.ledger.described is None and any(
        s.prepared is not None for s in state.members.sessions.values()
    )
    hint = "; two members with different keys have to say what the run is (trust.mode is open)" if undescribed else ""
    return f"{ready} of {least} nodes are ready{hint}"


def begin_waiting(transition: Transition, phase: Gathering, reason: WaitReason, sentence: str) -> None:
    """Logs the wait once, and drops the planner's outdated question."""
    if reason is WaitReason.NODES_MAY_RETURN and phase.waiting is None:
        phase = replace(phase, waiting=transition.now)
    if out := _out_of_use(transition.state.ledger):
        sentence = f"{sentence}; {out}"
    if quarantined := transition.state.ledger.trust.quarantined.values():
        names = name_some(why.node for why in quarantined)
        *_, last = quarantined
        sentence = f"{sentence}; quarantined: {names} (`dtfm-coordinator forgive NODE` lets one come back)"
        sentence = f"{sentence}; the last for {last.charge}: {last.reason}"
    if phase.said != sentence:
        asks = reason is WaitReason.STATE_IS_LOST
        transition.emit(ev.Waiting(f"{phase.reason}: {sentence}" if phase.reason else sentence, asks))
        phase = replace(phase, said=sentence)
    if phase != transition.state.phase:
        transition.set_phase(phase)
    if transition.state.planner.asked is not None:
        transition.end_question(transition.state.planner, False, sentence)


def _out_of_use(ledger: Ledger) -> str:
    """The nodes and pairs that plans leave out for now, and what would help; empty: there are none."""
    ready, said = set(ledger.ready), list[str]()
    if out := sorted(ready.difference(ledger.working)):
        why = "; ".join(f"{node} ({ledger.health[node].why})" for node in out[:MOST_NAMED])
        said.append(f"out of use until they pass a test, which comes by itself: {why}")
    if pairs := sorted(pair for pair in ledger.reach.broken if ready.issuperset(pair)):
        between = ", ".join(f"{one} and {other}" for one, other in pairs[:MOST_NAMED])
        said.append(
            f"a link that works would help between {between}, which is tried again by itself, or a relay (`dtfm-node relay`)"
        )
    return "; ".join(said)
