"""The fold of the log: what each event does to the ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.effects.access import revoked, with_room_for_another
from dtfm.coordinator.log.effects.links import broken_now, concerns_ready, with_connection, with_links, with_ways
from dtfm.coordinator.log.effects.members import (
    MOST_FAILURES,
    MOST_KNOWN,
    with_beginners,
    with_newcomer,
    with_waiting,
    without_member,
    without_members,
)
from dtfm.coordinator.log.effects.state import but_damaged, but_lost, held_by_plan
from dtfm.coordinator.log.effects.trust import NO_TRIAL, forgiven, quarantined, strikes_but_ended
from dtfm.coordinator.log.ledger import (
    SETTLED,
    UNAUDITED,
    Audits,
    Holder,
    Invited,
    Ledger,
    Member,
    Outcome,
)
from dtfm.coordinator.log.rounding import learned
from dtfm.protos.access import Role

MOST_HINDERED = 1000
"""The number of strikes that are remembered, the last ones."""

MOST_AGREED = 16
"""The number of steps whose agreed digests are remembered, the last ones."""

_NO_PLAN_FAILURES: dict[str, Any] = {"plan_failures": (), "losers": (), "damaged_by": ()}


def fold(events: Iterable[ev.Event], ledger: Ledger | None = None) -> Ledger:
    """The ledger after ``events``."""
    ledger = ledger or Ledger()
    for event in events:
        ledger = apply(ledger, event)
    return ledger


def apply(ledger: Ledger, event: ev.Event) -> Ledger:
    """The ledger after one more event."""
    match event:
        case ev.RunStarted():
            return Ledger(run_id=event.run_id, run=event.run)
        case ev.CoordinatorStopped():
            return without_members(ledger)
        case ev.RunResumed():
            outcome = ledger.outcome if ledger.outcome and ledger.outcome.completed else None
            fresh = replace(without_members(ledger), run=event.run, outcome=outcome)
            fresh = replace(fresh, failures=(), peer_losses=(), waited_for=(), evaded={}, checkpoint_failures=())
            # What made the step in hand fail may be mended now.
            stay = {who: why for who, why in ledger.quarantined.items() if not why.is_of_the_step_after(ledger.step)}
            fresh = replace(fresh, quarantined=stay)
            return replace(fresh, **_NO_PLAN_FAILURES, **NO_TRIAL)
        case ev.NodeJoined():
            member = Member(
                event.address, event.device, event.incarnation, candidates=event.candidates, relay=event.relay
            )
            joined = {**ledger.members, event.node: member}
            return replace(ledger, members=joined, worked=with_newcomer(ledger.worked, event.node, joined))
        case ev.NodeReady():
            member = replace(ledger.members[event.node], ready=True)
            ready = {**ledger.members, event.node: member}
            return replace(ledger, members=ready, tried_without=ledger.failed_without)
        case ev.NodeLeft():
            return without_member(ledger, event.node)
        case ev.NodeLeaving():
            member = replace(ledger.members[event.node], leaving=event.reason)
            return replace(ledger, members={**ledger.members, event.node: member})
        case ev.DeviceTimed() | ev.DeviceDrifted():
            member = ledger.members[event.node]
            member = replace(member, device=replace(member.device, flops=event.flops))
            changes = ledger.changes + (isinstance(event, ev.DeviceDrifted) and member.ready)
            return replace(ledger, members={**ledger.members, event.node: member}, changes=changes)
        case ev.DeviceShown():
            member = replace(ledger.members[event.node], shown=event.flops)
            return replace(
                ledger, members={**ledger.members, event.node: member}, changes=ledger.changes + member.ready
            )
        case ev.LinksMeasured():
            links = with_links(ledger.links, event.links)
            members = with_connection(ledger.members, event)
            broken = broken_now(links, ledger.broken, event.links)
            surprise = bool(event.reason) or concerns_ready(ledger, broken ^ ledger.broken)
            changes = ledger.changes + surprise
            return replace(ledger, members=members, links=links, broken=broken, changes=changes)
        case ev.WaysChosen():
            return with_ways(ledger, event.ways)
        case ev.RunDescribed():
            return replace(ledger, described=event.described, described_by=event.node)
        case ev.DataConfirmed():
            return replace(ledger, data_confirmed=True)
        case ev.PlanAdopted():
            return replace(
                ledger, generation=event.generation, plan=event.plan, codecs={}, counts_from=event.counts_from
            )
        case ev.PlanStarted():
            held = held_by_plan(ledger)
            return replace(ledger, held=held, codecs=event.codecs, **_NO_PLAN_FAILURES)
        case ev.CodecsChosen():
            return replace(ledger, codecs={**ledger.codecs, event.node: event.codecs})
        case ev.PlanFailed():
            held = but_lost(ledger, event)
            checkpoints, ledger = ledger.checkpoints, but_damaged(ledger, event)
            if ledger.checkpoints is not checkpoints:
                return replace(ledger, plan_failures=())
            if event.silent or event.suspects:
                return with_waiting(ledger, event)
            # With other state held the next plan differs, so the first such failure of a node does not count: it says all that it
            # has lost at once.
            if held != ledger.held and event.node not in ledger.losers:
                return replace(ledger, losers=(*ledger.losers, event.node), held=held)
            return replace(ledger, plan_failures=(*ledger.plan_failures, event.node), held=held)
        case ev.StepCommitted():
            seconds = ledger.step_seconds if event.resumed else event.seconds
            did = {node: ledger.worked[node] + 1 for node in event.compute_seconds if node in ledger.worked}
            worked = {**ledger.worked, **did}
            began = with_beginners(ledger, event, did)
            fresh = replace(ledger, failures=(), peer_losses=(), waited_for=(), worked=worked, began=began, **NO_TRIAL)
            evaded = {node: times for node, times in ledger.evaded.items() if node not in event.compute_seconds}
            fresh = replace(fresh, evaded=evaded)
            return replace(fresh, step=event.step, last=event, step_seconds=seconds)
        case ev.StepAborted(problem="PEER_LOST"):
            return replace(ledger, peer_losses=(*ledger.peer_losses, (event.node, event.peer)))
        case ev.StepAborted(problem="OVERDUE"):
            return with_waiting(ledger, event)
        case ev.StepAborted(problem="NODE_LEFT"):
            return ledger
        case ev.StepAborted():
            # What is wrong may have reached other nodes' work on the step.
            ledger = replace(ledger, counts_from=ledger.generation + 1)
            if event.problem in (SETTLED, UNAUDITED):
                return ledger
            failed_without = tuple(dict.fromkeys((*ledger.failed_without, *ledger.benched)))
            reports = (*ledger.failures, (event.node, event.problem))
            return replace(ledger, failures=reports, failed_without=failed_without)
        case ev.Evaluated():
            return replace(ledger, evaluated=event)
        case ev.CheckpointWritten():
            checkpoints = {**ledger.checkpoints, event.step: event.folder}
            manifests = {**ledger.manifests, event.step: event.manifest}
            return replace(ledger, checkpoints=checkpoints, manifests=manifests, checkpoint_failures=())
        case ev.CheckpointFailed():
            failures = (*ledger.checkpoint_failures, event.node)[-MOST_FAILURES:]
            return replace(ledger, checkpoint_failures=failures if event.node else ledger.checkpoint_failures)
        case ev.StandbyPromoted():
            assert event.step == ledger.step
            mine = (event.node, event.incarnation)
            held = tuple(
                who if mine in who or layer not in range(*event.layers) else (*who, mine)
                for layer, who in enumerate(ledger.held)
            )
            return replace(ledger, held=held)
        case ev.RolledBack():
            checkpoints = {step: folder for step, folder in ledger.checkpoints.items() if step <= event.step}
            if event.folder:
                checkpoints[event.step] = event.folder
            manifests = {step: digest for step, digest in ledger.manifests.items() if step <= event.step}
            agreed = {step: digests for step, digests in ledger.agreed.items() if step <= event.step}
            fresh = replace(ledger, plan=None, held=(), last=None, counts_from=ledger.generation + 1)
            fresh = replace(fresh, manifests=manifests, agreed=agreed)
            on_disks = ledger.on_disks if ledger.on_disks and ledger.on_disks.step <= event.step else None
            audits = {who: of.until(event.step) for who, of in ledger.audits.items()}
            began = {who: min(step, event.step) for who, step in ledger.began.items()}
            fresh = replace(fresh, audits=audits, began=began)
            return replace(fresh, step=event.step, checkpoints=checkpoints, on_disks=on_disks)
        case ev.StateAgreed():
            return replace(
                ledger, agreed=dict(sorted({**ledger.agreed, event.step: event.digests}.items())[-MOST_AGREED:])
            )
        case ev.SnapshotWritten():
            return replace(ledger, on_disks=event)
        case ev.InvitationMade():
            made = Invited(event.digest, event.role, event.expires, event.uses, event.by)
            return replace(ledger, invitations={**with_room_for_another(ledger, event.at), event.invitation: made})
        case ev.Enrolled():
            holder = Holder(event.key, event.role, event.invitation)
            fresh = replace(ledger, access={**ledger.access, event.name: holder})
            if (used := ledger.invitations.get(event.invitation)) is None:
                return fresh
            if event.role == Role.NODE and holder in ledger.access.values():
                return fresh  # another node of a machine that has come by it
            used = replace(used, used=used.used + 1)
            return replace(fresh, invitations={**ledger.invitations, event.invitation: used})
        case ev.Revoked():
            return revoked(ledger, event)
        case ev.NodeQuarantined():
            return quarantined(ledger, event)
        case ev.WorkAudited(why="unusual" | "evaluation") if event.clean or event.tied:
            return ledger
        case ev.WorkAudited(tied=True):
            return replace(ledger, rounding=learned(ledger.rounding, event))
        case ev.WorkAudited():
            who = event.key or event.node
            now = ledger.audits.get(who, Audits()).and_another(event)
            audits = {**{each: kept for each, kept in ledger.audits.items() if each != who}, who: now}
            audits = dict(list(audits.items())[-MOST_KNOWN:])
            return replace(ledger, audits=audits, rounding=learned(ledger.rounding, event))
        case ev.AuditHindered():
            return replace(ledger, strikes=(*ledger.strikes, event)[-MOST_HINDERED:])
        case ev.StrikesEnded():
            return replace(ledger, strikes=strikes_but_ended(ledger, event))
        case ev.NodesBenched():
            tried = (*ledger.tried_without, *event.nodes)
            return replace(ledger, benched=event.nodes, benched_for=event.reason, tried_without=tried)
        case ev.NodeForgiven():
            return forgiven(ledger, event)
        case ev.StateRefused():
            return replace(ledger, refused=(*ledger.refused, (event.node, event.donors))[-MOST_FAILURES:])
        case ev.RunFinished():
            return replace(ledger, outcome=Outcome(True, event.reason))
        case ev.RunFailed():
            return replace(ledger, outcome=Outcome(False, event.reason))
        case ev.NodeRefused() | ev.Waiting() | ev.DigestMismatch() | ev.GradientsClipped() | ev.StandingChanged():
            return ledger
