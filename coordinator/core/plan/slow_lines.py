"""Lines that become slow within a step. The step would take many times as long, and only its commit would show that
(plan/drift.py). So nodes report with their heartbeats how fast tensors come, and the step goes on under another plan.

A line that has become slow is also measured again: a plan without the line would never show that the line has recovered.
"""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.findings import Setback
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.plan.drift import link_drifted
from dtfm.coordinator.core.state.measured import Speeds
from dtfm.coordinator.core.state.session import Session
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log.steps import SLOW_LINE
from dtfm.protos import control_pb2 as wire

TIMES_SLOWER = 8.0
"""How many times slower than usual a line must be within a step. Smaller changes are left to the commits."""
LEAST_LEASES = 0.5
"""Tensors must have been under way for this time: two heartbeats."""
TIMES_LONGER = 2.0
"""A step must have taken this number of times its usual time before another plan takes over within it."""


def heard(transition: Transition, session: Session, beat: wire.Heartbeat) -> None:
    """Takes a node's report of how fast tensors come. If a line has become slow, plans use its new speed from now on."""
    phase, plan = transition.state.phase, transition.state.ledger.training.plan
    if not isinstance(phase, Stepping) or session.node in phase.votes or plan is None or not beat.arriving:
        return
    for arriving in beat.arriving if session.node in plan.nodes else ():
        line = arriving.source, session.node
        usual = transition.state.speeds.get(line, Speeds()).first
        link = transition.state.ledger.reach.links.get(line[0], {}).get(line[1])
        if link is None or usual is None or arriving.seconds < LEAST_LEASES * transition.state.lease:
            continue
        ratio = max(arriving.bytes, 1) / arriving.seconds / usual
        if ratio * TIMES_SLOWER > 1:
            continue
        link_drifted(transition, replace(link, bandwidth=link.bandwidth * ratio), ratio)
        speeds = {**transition.state.speeds, line: Speeds(noise=transition.state.speeds[line].noise)}
        transition.state = replace(transition.state, speeds=speeds)
        phase = replace(phase, slow_line=phase.slow_line or (*line, 1 / ratio))
        transition.set_phase(phase)


def leave_slow_line(transition: Transition) -> None:
    """The rule: a plan that was chosen because a line is slow takes over within the step, if the step already takes long. The
    work that nodes have done on the step counts (plan/adoption.py). Among strangers the plan waits for the commit: otherwise a
    node that keeps others waiting could put off the step's deadline by its heartbeats."""
    state, phase = transition.state, transition.state.phase
    if (
        not isinstance(phase, Stepping)
        or phase.slow_line is None
        or phase.commit_by is not None
        or state.ledger.is_open
    ):
        return
    training = state.ledger.training
    if state.planner.chosen is None or not state.rounds.at_rest(training.step):
        return
    if transition.now - phase.since < TIMES_LONGER * (training.step_seconds or 0.0):
        return
    source, destination, times = phase.slow_line
    reason = f"the line from {source} to {destination} is {times:.0f} times slower than usual"
    transition.find(Setback(SLOW_LINE, source, reason, switches=True))
