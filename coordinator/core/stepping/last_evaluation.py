"""The evaluation after the last step, where work is audited: no step follows it, so that one is voted on which nobody does.

Stepping -> Pausing, when nothing wrong was found in it, or it is given up: then the run ends as any other does. If somebody is
quarantined for it, the others evaluate again.
"""

from __future__ import annotations

from dtfm.coordinator.core.auditing import conduct
from dtfm.coordinator.core.messages import abort
from dtfm.coordinator.core.safekeeping import snapshot
from dtfm.coordinator.core.state import Destination, Pausing, Phase, State, Stepping
from dtfm.coordinator.core.stepping import post_commit
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.draw import cannot_be_audited
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan


def can_be_audited(state: State, plan: Plan) -> bool:
    """Whether another party can do any part of it again under this plan."""
    return len(cannot_be_audited(plan, party_of(state.ledger))) < len(plan.stages)


def is_in_hand(phase: Phase) -> bool:
    """Whether it is voted on now."""
    return isinstance(phase, Stepping) and phase.only_evaluation


def stands(transition: Transition, phase: Stepping) -> None:
    """Nothing wrong was found in what was drawn of it."""
    post_commit.audited(transition, phase)
    _pause(transition)


def give_up(transition: Transition, why: str, ender: str = "", lost: str = "") -> None:
    """Its audit is interrupted: the run ends without it. ``ender``, ``lost``: as in `conduct.interrupted`."""
    phase, plan = transition.state.phase, transition.state.ledger.training.plan
    assert isinstance(phase, Stepping)
    assert plan is not None
    conduct.interrupted(transition, phase, ender, lost)
    post_commit.evaluation_lost(transition, phase.step - 1, why)
    transition.send(plan.nodes, abort(plan, phase.step, why))
    _pause(transition)


def last_checkpoint_comes(transition: Transition) -> bool:
    """Whether all steps are trained, and their checkpoint is whole or under way."""
    ledger, steps = transition.state.ledger, transition.state.run.train.steps
    under_way = transition.state.safekeeping.snapshot(Destination.CHECKPOINT, steps)
    return ledger.training.step >= steps and (steps in ledger.copies.checkpoints or under_way is not None)


def _pause(transition: Transition) -> None:
    """The nodes get the last commit once more, which says now that nothing follows."""
    ledger, plan = transition.state.ledger, transition.state.ledger.training.plan
    assert plan is not None
    assert ledger.training.last is not None
    destination = wire.NO_SNAPSHOT
    if not last_checkpoint_comes(transition):
        destination = snapshot.begin(transition, ledger.training.step, checkpoint=True)
    commit = wire.Commit(
        generation=plan.generation,
        step=ledger.training.step,
        gradient_norm=ledger.training.last.gradient_norm,
        snapshot=destination,
        pause=True,
    )
    transition.send(plan.nodes, wire.CoordinatorMessage(commit=commit))
    transition.enter(Pausing(transition.now + transition.state.patience))
