"""The beginning of a step, when all nodes hold their state. If all steps are trained, the work after the last commit is
repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.copies import frozen_layers, same_state
from dtfm.coordinator.core.messages import beginnings
from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.plan import drift
from dtfm.coordinator.core.plan.adoption import regroup, settle_damage
from dtfm.coordinator.core.plan.expected import step_seconds
from dtfm.coordinator.core.step import outer_steps
from dtfm.coordinator.core.step.after_commit import announce
from dtfm.coordinator.core.timeouts import step_patience
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.votes import check_codecs, check_progress
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.chains import chains
from dtfm.scheduler.model.plan import Plan


def plan_ready(transition: Transition, node: str, ready: wire.PlanReady) -> None:
    """A node of the plan holds its state. When all nodes do, training goes on."""
    phase, ledger, run = transition.state.phase, transition.state.ledger, transition.state.run
    if not isinstance(phase, Switching) or ready.generation != ledger.training.generation:
        return
    if node not in phase.awaiting:
        if node not in phase.states:
            transition.set_phase(same_state.told(transition.state, phase, node, ready.states))
        return
    plan = ledger.training.in_force
    check_progress(ready.progress, plan, node)
    codecs = check_codecs(ready.codecs, plan, node, run.network)
    frozen_layers.told(transition, node, ready.frozen)
    phase = replace(
        phase,
        awaiting=phase.awaiting - {node},
        progress={**phase.progress, node: _counted(transition, node, ready.progress)},
        codecs={**phase.codecs, node: codecs} if codecs else phase.codecs,
    )
    phase = same_state.told(transition.state, phase, node, ready.states)
    transition.set_phase(phase)
    if phase.awaiting:
        settle_damage(transition)
        return
    if (setback := same_state.difference(transition, phase)) is not None:
        transition.find(setback)
        return
    _begin(transition, phase)


def _counted(transition: Transition, node: str, progress: wire.Progress) -> wire.Progress:
    """The part of a node's reported progress that counts: nothing, if the plan starts the step from its beginning."""
    ledger = transition.state.ledger
    if ledger.training.counts_from < ledger.training.generation or not (
        progress.activations or progress.gradients or progress.finished
    ):
        return progress
    transition.log(f"ignored the work that {node} reports of step {ledger.training.step + 1}: the step starts again")
    return wire.Progress()


def _begin(transition: Transition, phase: Switching) -> None:
    ledger, plan = transition.state.ledger, transition.state.ledger.training.in_force
    step = ledger.training.step + 1
    finished = {number for progress in phase.progress.values() for number in progress.finished}
    transition.emit(ev.PlanStarted(ledger.training.generation, step, len(finished), phase.codecs))
    transition.state = replace(transition.state, speeds=drift.begun(transition.state))
    if transition.state.is_closing and ledger.training.last is not None:
        announce(transition, plan)
        return
    if ledger.hold is not None and not ledger.hold.ends:
        regroup(transition, f"after step {ledger.training.step}")
        return
    resumed = any(p.activations or p.gradients or p.finished for p in phase.progress.values())
    again = transition.state.has_stalled
    counts = ledger.training.counts_from < ledger.training.generation  # otherwise nodes do not report their progress
    at = stalled(plan, phase.progress) if again and counts else frozenset[str]()
    deadline = transition.now + step_patience(transition.state.lease, step_seconds(transition.state), usual=again)
    look_at = outer_steps.to_try(transition.state, step)
    transition.enter(Stepping(step, transition.now, deadline, resumed=resumed, stalled=at, look_at=look_at))
    for nodes, begin in beginnings(plan, step, phase.progress, look_at):
        transition.send(nodes, wire.CoordinatorMessage(begin=begin))


def stalled(plan: Plan, progress: Mapping[str, wire.Progress]) -> frozenset[str]:
    """The nodes of ``plan`` where most micro-batches stand. ``progress``: by node, its report of the step. Empty: all
    micro-batches are done, and the reduction stands still.

    A micro-batch stands at the last node that has its input, and at the neighbour that reports not to have received its output:
    one of the two is wrong. Few micro-batches stand elsewhere, as a node has only a few in flight.
    """
    has = {node: (set(p.activations), set(p.gradients), set(p.finished)) for node, p in progress.items()}
    nothing: tuple[set[int], set[int], set[int]] = (set(), set(), set())
    at: Counter[str] = Counter()
    for number, chain in enumerate(chains(plan)):
        at.update(_stands_at(number, chain, [has.get(node, nothing) for node in chain]))
    most = max(at.values(), default=0)
    return frozenset(node for node, count in at.items() if count == most)


def _stands_at(number: int, chain: tuple[str, ...], has: list[tuple[set[int], set[int], set[int]]]) -> Collection[str]:
    """The nodes where a micro-batch stands. ``has``: by place in the chain, the micro-batches with activation, with gradient,
    done."""
    last = len(chain) - 1
    done = [place for place in range(len(chain)) if number in has[place][2]]
    back = [place for place in range(len(chain)) if number in has[place][1]]
    there = [place for place in range(len(chain)) if number in has[place][0]]
    if done and done[0] == 0:
        return ()
    if done or back:  # the micro-batch is on its way back, as far as ``place``
        place = min(back + done)
        return {chain[place], chain[place - 1]} if place in done else {chain[place]}
    if there and there[-1] == last:
        return {chain[last]}
    place = max(there, default=0)
    return {chain[place], chain[min(place + 1, last)]}
