"""The fold of the log: what each event does to the ledger. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import (
    CLEARED_BY,
    SETTLED,
    UNAUDITED,
    Audits,
    Carried,
    Holder,
    Invited,
    Ledger,
    Member,
    Outcome,
)
from dtfm.coordinator.log.rounding import learned, party_named, without
from dtfm.protos import MEASURED_TOGETHER
from dtfm.protos.access import Role

Row = TypeVar("Row")

MOST_QUARANTINED = 10_000
"""The number of quarantines that are remembered. From then on the oldest is forgotten for each new one."""

MOST_FAILURES = 100
"""The number of failed checkpoints in a row of which it is remembered because of whom, and of attempts that waited in vain."""

MOST_HINDERED = 1000
"""The number of strikes that are remembered, the last ones."""

MOST_AGREED = 16
"""The number of steps whose agreed digests are remembered, the last ones."""

MOST_KNOWN = 20_000
"""The number of nodes whose steps are remembered. From then on one that is no member is forgotten for each new one: that with the
fewest steps, of several the one that came last. So nobody loses what it has earned by others' coming and going."""

EXHAUSTED = 0.8
"""A connection limits its links if it carries less than this fraction of their sum."""

MOST_INVITATIONS = 1000
"""From this number on, those that are not good any more are forgotten."""

MOST_REVOKED = 10_000
"""The number of revoked names that are remembered. From then on the oldest is forgotten for each new one."""

_NO_PLAN_FAILURES: dict[str, Any] = {"plan_failures": (), "losers": (), "damaged_by": ()}


_NO_TRIAL: dict[str, Any] = {"benched": (), "benched_for": "", "tried_without": (), "failed_without": ()}


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
            return _emptied(ledger)
        case ev.RunResumed():
            outcome = ledger.outcome if ledger.outcome and ledger.outcome.completed else None
            fresh = replace(_emptied(ledger), run=event.run, outcome=outcome)
            fresh = replace(fresh, failures=(), peer_losses=(), waited_for=(), evaded={}, checkpoint_failures=())
            # What made the step in hand fail may be mended now.
            stay = {who: why for who, why in ledger.quarantined.items() if not why.is_of_the_step_after(ledger.step)}
            fresh = replace(fresh, quarantined=stay)
            return replace(fresh, **_NO_PLAN_FAILURES, **_NO_TRIAL)
        case ev.NodeJoined():
            member = Member(
                event.address, event.device, event.incarnation, candidates=event.candidates, relay=event.relay
            )
            joined = {**ledger.members, event.node: member}
            return replace(ledger, members=joined, worked=_known(ledger.worked, event.node, joined))
        case ev.NodeReady():
            member = replace(ledger.members[event.node], ready=True)
            ready = {**ledger.members, event.node: member}
            return replace(ledger, members=ready, tried_without=ledger.failed_without)
        case ev.NodeLeft():
            return _without(ledger, event.node)
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
            links = _with_links(ledger.links, event.links)
            members = _with_connection(ledger.members, event)
            broken = _broken(links, ledger.broken, event.links)
            surprise = bool(event.reason) or _concerns_ready(ledger, broken ^ ledger.broken)
            changes = ledger.changes + surprise
            return replace(ledger, members=members, links=links, broken=broken, changes=changes)
        case ev.WaysChosen():
            return _with_ways(ledger, event.ways)
        case ev.RunDescribed():
            return replace(ledger, described=event.described, described_by=event.node)
        case ev.DataConfirmed():
            return replace(ledger, data_confirmed=True)
        case ev.PlanAdopted():
            return replace(
                ledger, generation=event.generation, plan=event.plan, codecs={}, counts_from=event.counts_from
            )
        case ev.PlanStarted():
            held = _held_by_plan(ledger)
            return replace(ledger, held=held, codecs=event.codecs, **_NO_PLAN_FAILURES)
        case ev.CodecsChosen():
            return replace(ledger, codecs={**ledger.codecs, event.node: event.codecs})
        case ev.PlanFailed():
            held = _but_lost(ledger, event)
            checkpoints, ledger = ledger.checkpoints, _but_damaged(ledger, event)
            if ledger.checkpoints is not checkpoints:
                return replace(ledger, plan_failures=())
            if event.silent or event.suspects:
                return _waited(ledger, event)
            # With other state held the next plan differs, so the first such failure of a node does not count: it says all that it
            # has lost at once.
            if held != ledger.held and event.node not in ledger.losers:
                return replace(ledger, losers=(*ledger.losers, event.node), held=held)
            return replace(ledger, plan_failures=(*ledger.plan_failures, event.node), held=held)
        case ev.StepCommitted():
            seconds = ledger.step_seconds if event.resumed else event.seconds
            did = {node: ledger.worked[node] + 1 for node in event.compute_seconds if node in ledger.worked}
            worked = {**ledger.worked, **did}
            began = _begun(ledger, event, did)
            fresh = replace(ledger, failures=(), peer_losses=(), waited_for=(), worked=worked, began=began, **_NO_TRIAL)
            evaded = {node: times for node, times in ledger.evaded.items() if node not in event.compute_seconds}
            fresh = replace(fresh, evaded=evaded)
            return replace(fresh, step=event.step, last=event, step_seconds=seconds)
        case ev.StepAborted(problem="PEER_LOST"):
            return replace(ledger, peer_losses=(*ledger.peer_losses, (event.node, event.peer)))
        case ev.StepAborted(problem="OVERDUE"):
            return _waited(ledger, event)
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
            return replace(ledger, invitations={**_remembered(ledger, event.at), event.invitation: made})
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
            return _revoked(ledger, event)
        case ev.NodeQuarantined():
            return _quarantined(ledger, event)
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
            return replace(ledger, strikes=_but_ended(ledger, event))
        case ev.NodesBenched():
            tried = (*ledger.tried_without, *event.nodes)
            return replace(ledger, benched=event.nodes, benched_for=event.reason, tried_without=tried)
        case ev.NodeForgiven():
            return _forgiven(ledger, event)
        case ev.StateRefused():
            return replace(ledger, refused=(*ledger.refused, (event.node, event.donors))[-MOST_FAILURES:])
        case ev.RunFinished():
            return replace(ledger, outcome=Outcome(True, event.reason))
        case ev.RunFailed():
            return replace(ledger, outcome=Outcome(False, event.reason))
        case ev.NodeRefused() | ev.Waiting() | ev.DigestMismatch() | ev.GradientsClipped() | ev.StandingChanged():
            return ledger


def _begun(ledger: Ledger, event: ev.StepCommitted, nodes: Iterable[str]) -> Mapping[str, int]:
    new = {ledger.key_of(node) or node for node in nodes} - ledger.began.keys()
    began = {**ledger.began, **dict.fromkeys(sorted(new), event.step - 1)}
    return dict(list(began.items())[-MOST_KNOWN:]) if new else ledger.began


def _remembered(ledger: Ledger, at: float) -> Mapping[str, Invited]:
    """All invitations, as long as there is room to remember those that are not good any more."""
    if len(ledger.invitations) < MOST_INVITATIONS:
        return ledger.invitations
    return {id: invited for id, invited in ledger.invitations.items() if invited.is_usable(at)}


def _known(worked: Mapping[str, int], node: str, members: Collection[str]) -> Mapping[str, int]:
    """Whose steps are remembered once this node has come."""
    if node in worked:
        return worked
    gone = [other for other in worked if other not in members] if len(worked) >= MOST_KNOWN else []
    forgotten = min(reversed(gone), key=lambda other: worked[other], default=None)
    return {**{other: steps for other, steps in worked.items() if other != forgotten}, node: 0}


def _revoked(ledger: Ledger, event: ev.Revoked) -> Ledger:
    revoked = {**ledger.revoked, event.name: event.at} if event.name else ledger.revoked
    who = ledger.key_of(event.name) or event.name
    return replace(
        _without_audits(_without_witness(ledger, who), {who}),
        rounding=without(ledger.rounding, who),
        invitations={
            id: replace(invited, revoked=invited.revoked or id in event.invitations)
            for id, invited in ledger.invitations.items()
        },
        access={name: holder for name, holder in ledger.access.items() if name != event.name},
        revoked=dict(list(revoked.items())[-MOST_REVOKED:]),
    )


def _quarantined(ledger: Ledger, event: ev.NodeQuarantined) -> Ledger:
    """What the node had in memory counts no more, and it may have been the cause of all the waiting until now. If an operator
    expels it, or it goes while the step is tried without others, it may be the one who is looked for: the trial begins anew."""
    anew: dict[str, Any] = (
        {"failures": (), **_NO_TRIAL} if event.charge is Charge.OPERATOR or ledger.tried_without else {}
    )
    names = {event.node, *(name for name, holder in ledger.access.items() if event.key and holder.key == event.key)}
    settled = names if ledger.is_open else set[str]()  # what strangers said before is settled against them
    who = event.key or event.node
    quarantined = dict(list({**ledger.quarantined, who: event}.items())[-MOST_QUARANTINED:])
    return replace(
        _without_audits(_without_witness(ledger, who), ledger.quarantined.keys() - quarantined.keys()),
        held=tuple(tuple(who for who in layer if who[0] not in names) for layer in ledger.held),
        quarantined=quarantined,
        rounding=without(ledger.rounding, who),
        waited_for=(),
        evaded={},
        plan_failures=tuple(node for node in ledger.plan_failures if node not in settled),
        checkpoint_failures=tuple(node for node in ledger.checkpoint_failures if node not in settled),
        **anew,
    )


def _forgiven(ledger: Ledger, event: ev.NodeForgiven) -> Ledger:
    """Whom an operator forgives begins anew, as one who is suspected. Who was cleared is what it was before."""
    of = (event.node, event.key)
    ended = {who: why for who, why in ledger.quarantined.items() if who in of}
    fresh = replace(
        ledger,
        quarantined={who: why for who, why in ledger.quarantined.items() if who not in of},
        refused=tuple((node, donors) for node, donors in ledger.refused if event.node not in donors),
    )
    if event.by == CLEARED_BY:
        return fresh
    forgiven = {**{who: why for who, why in ledger.forgiven.items() if who not in of}, **ended}
    return replace(_without_audits(fresh, ended), forgiven=dict(list(forgiven.items())[-MOST_QUARANTINED:]))


def _without_audits(ledger: Ledger, whose: Collection[str]) -> Ledger:
    """``whose``: keys, or names where no key is known."""
    return replace(
        ledger,
        audits={who: audits for who, audits in ledger.audits.items() if who not in whose},
        began={who: step for who, step in ledger.began.items() if who not in whose},
    )


def _without_witness(ledger: Ledger, who: str) -> Ledger:
    """What this party has found right counts for nobody any more."""
    name = party_named(who)
    return replace(
        ledger,
        audits={
            each: replace(audits, by=tuple(by for by in audits.by if by != name)) if name in audits.by else audits
            for each, audits in ledger.audits.items()
        },
    )


def _but_ended(ledger: Ledger, event: ev.StrikesEnded) -> tuple[ev.AuditHindered, ...]:
    def is_of(name: str, who: str) -> bool:
        return who in (name, _party(ledger, name))

    its = [each for each in ledger.strikes if is_of(each.node, event.who)]
    if not event.all:
        its = [each for each in its if (is_of(each.of, event.of) if event.of else not each.of)][:1]
    return tuple(each for each in ledger.strikes if not any(each is ended for ended in its))


def _waited(ledger: Ledger, event: ev.StepAborted | ev.PlanFailed) -> Ledger:
    suspects = frozenset(event.suspects or (event.node,))
    return replace(ledger, waited_for=(*ledger.waited_for, suspects)[-MOST_FAILURES:])


def _emptied(ledger: Ledger) -> Ledger:
    """Without members. Those that return still have what they had."""
    return replace(ledger, members={}, links={}, broken=frozenset(), ways={}, plan=None)


def _without(ledger: Ledger, node: str) -> Ledger:
    return replace(
        ledger,
        members={name: member for name, member in ledger.members.items() if name != node},
        links={source: _but(row, node) for source, row in ledger.links.items() if source != node},
        broken=frozenset(pair for pair in ledger.broken if node not in pair),
        ways={source: _but(row, node) for source, row in ledger.ways.items() if source != node} if ledger.ways else {},
        peer_losses=tuple(pair for pair in ledger.peer_losses if node not in pair),
        waited_for=tuple(suspects - {node} for suspects in ledger.waited_for),
        evaded=_evaded(ledger, node),
    )


def _evaded(ledger: Ledger, node: str) -> Mapping[str, int]:
    """With the last attempts in a row that waited for this node, which leaves."""
    times = next((n for n, suspects in enumerate(reversed(ledger.waited_for)) if node not in suspects), None)
    if not (times := len(ledger.waited_for) if times is None else times):
        return ledger.evaded
    others = {other: before for other, before in ledger.evaded.items() if other != node}
    return dict(list({**others, node: ledger.evaded.get(node, 0) + times}.items())[-MOST_KNOWN:])


def _party(ledger: Ledger, name: str) -> str:
    return ledger.key_of(name) or name


def _but_damaged(ledger: Ledger, failed: ev.PlanFailed) -> Ledger:
    """Without the snapshot that is damaged, once two parties have said so: the memory of the first may be damaged itself, or it
    may lie. Where there is one party alone, it has to say so twice, and two of its nodes if it is a checkpoint, which all read.
    The only checkpoint is not given up."""
    if not failed.snapshot_damaged:
        return ledger

    said = {*ledger.damaged_by, failed.node}
    is_alone = len({_party(ledger, node) for node in (*ledger.members, *said)}) == 1
    several = is_alone or len({_party(ledger, node) for node in said}) > 1
    before, ledger = ledger.damaged_by, replace(ledger, damaged_by=(*ledger.damaged_by, failed.node)[-MOST_FAILURES:])
    if not before or not several:
        return ledger
    if ledger.on_disks is not None and ledger.on_disks.step == ledger.step:
        return replace(ledger, on_disks=None, damaged_by=())
    others = {step: folder for step, folder in ledger.checkpoints.items() if step != ledger.step}
    if ledger.state_is_held or not others or len(said) == 1:
        return ledger
    return replace(ledger, checkpoints=others, damaged_by=())


def _but_lost(ledger: Ledger, failed: ev.PlanFailed) -> tuple[tuple[tuple[str, str], ...], ...]:
    return tuple(
        tuple(who for who in holders if who[0] != failed.node) if layer in failed.lost else holders
        for layer, holders in enumerate(ledger.held)
    )


def _with_links(
    links: Mapping[str, Mapping[str, ev.Link]], measured: Iterable[ev.Link]
) -> Mapping[str, Mapping[str, ev.Link]]:
    rows: dict[str, dict[str, ev.Link]] = {}
    for link in measured:
        row = rows.get(link.source)
        if row is None:
            row = rows[link.source] = dict(links.get(link.source, {}))
        before = row.get(link.destination)
        row[link.destination] = replace(link, way=before.way) if before is not None and not link.way else link
    return {**links, **rows}


def _with_ways(ledger: Ledger, chosen: Iterable[ev.Way]) -> Ledger:
    ways = {source: dict(row) for source, row in ledger.ways.items()}
    links = []
    for way in chosen:
        row = ways.setdefault(way.source, {})
        row.pop(way.destination, None)
        if not way.is_direct:
            row[way.destination] = way
        if (link := ledger.links.get(way.source, {}).get(way.destination)) is not None:
            links.append(replace(link, way=way.name))
    return replace(
        ledger, ways={source: row for source, row in ways.items() if row}, links=_with_links(ledger.links, links)
    )


def _with_connection(members: Mapping[str, Member], measured: ev.LinksMeasured) -> Mapping[str, Member]:
    def carried(together: float | None, apart: list[ev.Link], before: Carried | None) -> Carried | None:
        if together is None:
            return before
        reached = sorted((link for link in apart if link.bandwidth > 0), key=lambda link: link.latency_seconds)
        whole = sum(link.bandwidth for link in reached[:MEASURED_TOGETHER])
        return Carried(together, least=together >= EXHAUSTED * whole)

    if measured.up is None and measured.down is None:
        return members
    node, member = measured.node, members[measured.node]
    up = carried(measured.up, [link for link in measured.links if link.source == node], member.up)
    down = carried(measured.down, [link for link in measured.links if link.destination == node], member.down)
    return {**members, node: replace(member, up=up, down=down)}


def _broken(
    links: Mapping[str, Mapping[str, ev.Link]], broken: frozenset[tuple[str, str]], measured: Iterable[ev.Link]
) -> frozenset[tuple[str, str]]:
    pairs = {(min(link.source, link.destination), max(link.source, link.destination)) for link in measured}
    both = {(a, b): (links.get(a, {}).get(b), links.get(b, {}).get(a)) for a, b in pairs}
    now = {pair for pair, ways in both.items() if any(link is not None and link.bandwidth == 0 for link in ways)}
    return (broken - pairs) | now


def _concerns_ready(ledger: Ledger, pairs: Iterable[tuple[str, str]]) -> bool:
    return any(ledger.members[a].ready and ledger.members[b].ready for a, b in pairs)


def _but(row: Mapping[str, Row], node: str) -> Mapping[str, Row]:
    if node not in row:
        return row
    fewer = dict(row)
    del fewer[node]
    return fewer


def _held_by_plan(ledger: Ledger) -> tuple[tuple[tuple[str, str], ...], ...]:
    assert ledger.plan is not None
    return tuple(
        tuple((node, ledger.members[node].incarnation) for node in stage.replicas)
        for stage in ledger.plan.stages
        for _ in range(*stage.layers)
    )
