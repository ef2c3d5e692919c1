"""Going back to an earlier step for an operator: the steps to choose from, what is lost, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtfm.coordinator.core.copies.availability import Kind, ResumePoint, availability, on_disk
from dtfm.coordinator.core.messages import abort
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.plan.adoption import regroup
from dtfm.coordinator.core.plan.undoing import go_back
from dtfm.coordinator.core.refusal import Refused, name_some
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust import auditing
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.steps import ROLLED_BACK
from dtfm.protos import control_pb2 as wire
from dtfm.protos.printable import counted

MOST_LISTED = 8
"""The number of steps that a refusal lists, the newest ones."""


@dataclass(frozen=True, slots=True)
class Place:
    """Training can go back to ``point``. ``where`` describes it, like "the whole state, on the disks of a, b"."""

    point: ResumePoint
    where: str


def places(state: State) -> tuple[Place, ...]:
    """The places that training can go back to, the newest first. For each step the best: the whole state rather than the
    weights."""
    copies, now, found = state.ledger.copies, state.ledger.training.step, {0: Place(ResumePoint(0, None), "the start")}
    for step, checkpoint in copies.checkpoints.items():
        kind = Kind.WEIGHTS if checkpoint.weights else Kind.CHECKPOINT
        what = "the weights, without AdamW's moments" if checkpoint.weights else "the whole state"
        found[step] = Place(ResumePoint(step, kind), f"{what}, in {checkpoint.folder}")
    for step, snapshot in copies.on_disks.items():
        holders = on_disk(state, step, range(len(snapshot.parts)))
        if len(holders) == len(snapshot.parts):
            nodes = {node for nodes in holders.values() for node in nodes}
            found[step] = Place(ResumePoint(step, Kind.DISK), f"the whole state, on the disks of {name_some(nodes)}")
    return tuple(place for step, place in sorted(found.items(), reverse=True) if step < now)


def place_of(state: State, step: int) -> Place:
    """Where the state after ``step`` is. Raises Refused."""
    there, now = places(state), state.ledger.training.step
    if found := next((place for place in there if place.point.step == step), None):
        return found
    if step == now:
        raise Refused(wire.MALFORMED, f"the run is at step {now}, and needs no way back there{_instead(there)}")
    if step in state.ledger.copies.on_disks:
        nodes = state.ledger.copies.on_disks[step].holders.keys() - state.members.sessions.keys()
        why = f"part of the state after step {step} is on the disks of nodes that are not here: {name_some(nodes)}"
        raise Refused(wire.MALFORMED, f"{why}{_instead(there)}")
    raise Refused(wire.MALFORMED, f"the state after step {step} is nowhere{_instead(there)}")


def consequences(state: State, place: Place) -> str:
    """The effect of going back to the place, as a sentence."""
    now, step = state.ledger.training.step, place.point.step
    later = sorted(each for each in state.ledger.copies.checkpoints if each > step)
    deleted = f"; the checkpoints of steps {', '.join(map(str, later))} are deleted" if later else ""
    moments = "; AdamW's moments begin at zero" if place.point.kind is Kind.WEIGHTS else ""
    lost = counted(now - step, "step")
    return (
        f"training would go back from step {now} to step {step} ({place.where}): {lost} would be lost{moments}{deleted}"
    )


def go_on_from(transition: Transition, *, weights: bool, by: str) -> str:
    """Goes on after the state is lost: from the newest ``weights`` in a checkpoint, or from the start. Returns the event's
    sentence. Raises Refused."""
    state, copies = transition.state, transition.state.ledger.copies
    step, newest = state.ledger.training.step, copies.checkpoint_step
    option = "weights" if weights else "start"
    if not step or availability(state).resume_point().step >= step:
        raise Refused(
            wire.MALFORMED,
            f"no state is lost: the run has the state of step {step}. `dtfm-coordinator continue` without --from {option} goes "
            "on with a run that is paused, and `dtfm-coordinator rollback STEP` goes back to an earlier step",
        )
    if weights and not newest:
        raise Refused(wire.MALFORMED, f"there are no weights in a checkpoint{_instead(places(state))}")
    kind = None if not weights else Kind.WEIGHTS if copies.checkpoints[newest].weights else Kind.CHECKPOINT
    point = ResumePoint(newest if weights else 0, kind)
    origin = f"the weights of step {newest}" if weights else "the start"
    reason = f"{by} goes on from {origin}, as the state of step {step} is lost"
    # Checkpoints stay: none of them is in doubt, and there may be no other copies.
    back = go_back(transition, point, reason, in_doubt=False)
    regroup(transition, reason)
    return back.narrate()


def roll_back(transition: Transition, place: Place, by: str) -> str:
    """Gives up the current step and all steps after the place's. A paused run stays paused. Returns the event's sentence."""
    state, plan = transition.state, transition.state.ledger.training.plan
    reason = f"{by} went back to step {place.point.step}"
    if isinstance(state.phase, Stepping) and plan is not None:
        auditing.interrupted(transition, state.phase, "")
        generation = state.ledger.training.generation
        transition.emit(ev.StepAborted(state.phase.step, generation, ROLLED_BACK, by, reason))
        transition.send(plan.nodes, abort(plan, state.phase.step, reason))
        state = transition.state
    transition.state = replace(state, evaluation=None)  # its step is undone
    back = go_back(transition, place.point, reason)
    regroup(transition, reason)
    return back.narrate()


def _instead(there: tuple[Place, ...]) -> str:
    """The places that training can go back to, as the end of a sentence."""
    told = [f"{place.point.step} ({place.where})" for place in there]
    shown = told[:MOST_LISTED]
    if len(told) > MOST_LISTED:
        shown = [*told[: MOST_LISTED - 1], f"{len(told) - MOST_LISTED} more", told[-1]]
    return f". There are: {'; '.join(shown)}" if shown else ". There is nothing before it"
