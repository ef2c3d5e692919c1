"""The pause after a commit: before another plan, before a node leaves that no node can replace, after the last step, and when an
operator asks for a pause."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.copies.agreed_state import by_stage
from dtfm.coordinator.core.copies.availability import is_under_way
from dtfm.coordinator.core.ending import conclude
from dtfm.coordinator.core.findings import Setback, Unwell
from dtfm.coordinator.core.phases import Pausing
from dtfm.coordinator.core.plan.adoption import adopt, again, regroup
from dtfm.coordinator.core.refusal import name_some
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.step import evaluation
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.agreement import islands_differ, stage_differs
from dtfm.coordinator.core.validation.votes import check_digest, check_states
from dtfm.coordinator.log.steps import OVERDUE
from dtfm.protos import control_pb2 as wire


def applied(transition: Transition, node: str, message: wire.Applied) -> None:
    """A node has applied the commit before the pause."""
    phase, ledger = transition.state.phase, transition.state.ledger
    plan = ledger.training.plan
    if not isinstance(phase, Pausing) or plan is None or node not in plan.nodes:
        return
    if (message.generation, message.step) == (plan.generation, ledger.training.step):
        check_digest(message.state_digest)
        check_states(message.states, ledger.description.buckets)
        applied = {**phase.applied, node: message}
        transition.set_phase(replace(phase, applied=applied, awaiting=phase.awaiting - {node}))


def node_left(transition: Transition, node: str) -> None:
    """Stops waiting for the node, even if it returns: its new process has not seen the commit."""
    if isinstance(phase := transition.state.phase, Pausing):
        transition.set_phase(replace(phase, awaiting=phase.awaiting - {node}))


def end_pause(transition: Transition) -> None:
    """The rule: when the pause waits for nothing, the run ends, stands still, or goes on with the chosen plan. A pause for a node
    that wants to leave ends when the node has left (members/leaving.py)."""
    phase, ledger = transition.state.phase, transition.state.ledger
    if transition.state.stopped or not isinstance(phase, Pausing) or phase.awaiting:
        return
    step, digests = ledger.training.step, {node: said.state_digest for node, said in phase.applied.items()}
    found = stage_differs(ledger, digests)
    if found is None and transition.state.rounds.at_rest(step):
        found = islands_differ(ledger, phase.applied)
    if found is not None:
        transition.find(found)
        return
    by_stage(transition, phase.applied)
    if awaits(transition.state, phase):
        return
    if transition.state.is_closing:
        if ledger.copies.is_safe(step):
            conclude(transition)
        elif transition.now >= transition.state.safekeeping.next_checkpoint:
            again(transition, "the last checkpoint failed")
    elif ledger.hold is not None:
        regroup(transition, f"after step {step}")
    elif transition.state.planner.chosen is not None:
        adopt(transition, transition.state.planner.chosen, "")
    elif not phase.for_leaver:
        again(transition, "what the pause was for has changed")


def awaits(state: State, phase: Pausing) -> str:
    """What the pause still waits for; empty: nothing."""
    kept, step = state.safekeeping, state.ledger.training.step
    if state.is_closing and not state.ledger.copies.is_safe(step) and is_under_way(state, step):
        return "the last checkpoint"
    if phase.for_leaver and kept.snapshot is not None:
        return "the snapshot"
    if state.evaluation is not None and state.evaluation.step == step:
        return "the held-out loss"
    return f"the confirmation of {name_some(phase.awaiting)}" if phase.awaiting else ""


def pause_overdue(transition: Transition, phase: Pausing) -> None:
    """The pause exceeded its deadline, though heartbeats came. The held-out loss is given up, as whole chains of nodes take
    part in it; `checkpoints.go_on` gives up a checkpoint. Nodes that have not confirmed the commit are left out: each
    confirms by itself."""
    step = transition.state.ledger.training.step
    waited = f"{phase.deadline - phase.since:.3g} seconds"
    evaluation.lost(transition, f"it did not come within {waited}")
    if not phase.awaiting:
        return
    reason = f"step {step} is trained, but {awaits(transition.state, phase)} did not come within {waited}"
    suspects = tuple(sorted(phase.awaiting))
    unwell = tuple(Unwell(node, OVERDUE, reason) for node in suspects)
    transition.find(Setback(OVERDUE, suspects[0], reason, unwell=unwell))
