"""What is on the nodes' own disks, what they are to keep there, and whether there is room for it."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.copies.availability import moved_bytes, parameter_bytes
from dtfm.coordinator.core.state.session import Admission, Session
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.files import check_parts
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan

SNAPSHOTS = 4
"""A node's disk may need room for this many snapshots of its part: the two kept ones, the one being written, and as
much as writing that one must leave free."""

ROOM_BYTES = 1 << 30
"""The bytes left free on the coordinator's disk, for the log and for other programs."""


def to_keep(state: State) -> wire.Keep:
    """The snapshots that every node should keep: the whole ones, the one being written, and the one being sent to a
    checkpoint."""
    under_way = [each.step for each in (state.safekeeping.snapshot, state.safekeeping.upload) if each is not None]
    return wire.Keep(steps=sorted({*state.ledger.copies.on_disks, *under_way}))


def tidy(transition: Transition) -> None:
    """Tells nodes to delete snapshots that they should not keep."""
    keep = to_keep(transition.state)
    sessions = transition.state.members.sessions
    for session in [s for s in sessions.values() if s.on_disk.keys() - keep.steps]:
        kept = {step: buckets for step, buckets in session.on_disk.items() if step in keep.steps}
        transition.set_session(replace(session, on_disk=kept))
    have_read = [s.node for s in sessions.values() if s.admission not in (Admission.JOINED, Admission.RELAY)]
    transition.send(have_read, wire.CoordinatorMessage(keep=keep))


def look_for_room(transition: Transition, before: Plan | None) -> None:
    """After a plan is adopted: reports disks that are too small for the snapshots and checkpoints that the run may keep there.
    ``before``: the previous plan, which was checked already. Training goes on, and a failed write is tried again."""
    state, run, plan = transition.state, transition.state.run, transition.state.ledger.training.in_force
    workload = state.ledger.description.workload
    if before is None and run.keeps_checkpoints_itself:
        each = (parameter_bytes if run.checkpoint.weights else moved_bytes)(state, (0, len(workload.layers)))
        needed = round((run.checkpoint.keep + 1) * each + ROOM_BYTES)  # an older one goes when the new one is whole
        if state.disk_bytes < needed:
            transition.emit(ev.DiskShort("", int(state.disk_bytes), needed))
    parts = {node: stage.layers for stage in plan.stages for node in stage.replicas}
    told = {node: stage.layers for stage in before.stages for node in stage.replicas} if before is not None else {}
    sharing: dict[str, list[str]] = {}
    for node in sorted(parts):
        sharing.setdefault(state.ledger.key_of(node) or node, []).append(node)
    for nodes in sharing.values():
        sessions = [state.members.sessions[node] for node in nodes if node in state.members.sessions]
        sizes = (moved_bytes(state, parts[s.node]) * (SNAPSHOTS - len(s.on_disk)) for s in sessions)
        needed, free = round(sum(sizes)), min((s.disk_bytes for s in sessions), default=0)
        if 0 < free < needed and any(told.get(node) != parts[node] for node in nodes):
            transition.emit(ev.DiskShort(", ".join(nodes), free, needed))


def claimed(transition: Transition, session: Session, message: wire.Prepared) -> None:
    """A node that has just joined lists the snapshot files on its disk, without digests. Only buckets count that the node had
    when the snapshot became whole. If the step was trained again since then, the node may have other files of it."""
    claims = message.on_disk
    described, whole = transition.state.ledger.description, transition.state.ledger.copies.on_disks
    for claim in claims:
        check_parts(claim, described.buckets, digest_bytes=0)
    counting = {
        claim.step: whole[claim.step].buckets_of(session.node).intersection(part.bucket for part in claim.parts)
        for claim in claims
        if claim.step in whole
    }
    transition.set_session(replace(session, on_disk=counting, disk_bytes=message.disk_bytes))
    if claims:
        transition.send([session.node], wire.CoordinatorMessage(keep=to_keep(transition.state)))
