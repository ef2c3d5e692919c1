"""Takes the timings of idle nodes that have timed their device again (node/training/preparing/timing.py)."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.health import failing_nodes
from dtfm.coordinator.core.plan.drift import DEVICE_OFF
from dtfm.coordinator.core.state.session import Session
from dtfm.coordinator.core.timeouts import TIMED_LEASES
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.admission import check_flops
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.members import planned_flops
from dtfm.protos import control_pb2 as wire


def timed_again(transition: Transition, session: Session, message: wire.Timed) -> None:
    """Plans with the new speed if it differs from the previous one by DEVICE_OFF. Ignores a node that trains: its steps say more.
    Ignores a node that reports too often, as each report may start the planner. Raises Refused."""
    check_flops(message.flops, "timed.flops")
    node, ledger = session.node, transition.state.ledger
    plan, member = ledger.training.plan, ledger.members[node]
    was_asked = failing_nodes.answered(transition, node)
    ledger = transition.state.ledger
    too_soon = not was_asked and transition.now - session.timed < TIMED_LEASES * transition.state.lease
    if too_soon or (not was_asked and plan is not None and plan.stage_of(node) is not None):
        transition.log(f"ignored that {node} has timed its device again: it {'just has' if too_soon else 'trains'}")
        return
    transition.set_session(replace(session, timed=transition.now))
    (before,) = planned_flops(ledger, [node])
    known = replace(member, device=replace(member.device, flops=message.flops), in_training=0.0)
    (now,) = planned_flops(ledger.with_member(node, replace(known, timed_beside=message.beside)), [node])
    if 1 / DEVICE_OFF < now / before < DEVICE_OFF:
        return
    on = "beside other programs" if message.beside else "on a quiet machine"
    reason = f"timed again {on}, it counts with {now / 1e9:.3g} GFLOP/s and not {before / 1e9:.3g}"
    transition.emit(ev.DeviceTimed(node, message.flops, reason, message.beside))
