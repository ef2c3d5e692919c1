"""Links: which node measures which, and links that became slow. Broken links are in core/health/broken_pairs.py."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

from dtfm.coordinator.core.reach import ways
from dtfm.coordinator.core.state.members import Retry
from dtfm.coordinator.core.state.session import Admission, Session
from dtfm.coordinator.core.timeouts import PROBE_LEASES, SIGN_OF_LIFE_LEASES
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.links import check_connection, check_links
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.health import LONGEST_PAUSE_LEASES
from dtfm.coordinator.log.reach import pair_of
from dtfm.protos import MEASURED_TOGETHER, control_pb2 as wire

MOST_PROBED = 64
"""The number of nodes that a newcomer measures its links to. That takes about PROBE_LEASES at a lease of 10 seconds. Its other
links count as average."""


MOST_SLOW = 256
"""The number of slow links that are measured again."""
TIMES_FASTER = 2.0
"""The planner looks again when a slow link has become this number of times faster."""

_NO_PEERS = (Admission.JOINED, Admission.RELAY)
"""Nodes at these stages of their admission exchange no tensors, at least not yet."""


def probe_from(transition: Transition, session: Session) -> bool:
    """Has a newcomer measure its links to earlier nodes. Returns whether to wait for its report."""
    others = sorted(
        (s for s in transition.state.members.sessions.values() if s.admission not in _NO_PEERS),
        key=lambda s: s.node,
    )
    # Drawn by name, so that every node has measured links, and a replay draws the same. Up to half are of its own key, and these
    # come first: they may be on its machine.
    key_of = transition.state.ledger.key_of
    key, drawn = key_of(session.node), random.Random(session.node).sample(others, len(others))
    own = [s for s in drawn if key and key_of(s.node) == key][: MOST_PROBED // 2]
    peers = list({s.node: s for s in (*own, *drawn)}.values())[:MOST_PROBED]
    lively = [peer for peer in peers if transition.now - peer.heard <= SIGN_OF_LIFE_LEASES * transition.state.lease]
    silent = [peer for peer in peers if peer not in lively]
    for group in (lively, silent):  # separately, so that no node waits for the answer of a silent one
        if group:
            ways.probe(transition, session.node, group)
    names = frozenset(peer.node for peer in lively)
    session = transition.state.members.sessions[session.node]
    transition.set_session(replace(session, probing=names, reaching=names))
    ways.have_dialled(transition, session, lively)
    return bool(lively)


def measured(transition: Transition, session: Session, report: wire.LinkReport) -> None:
    """Takes a node's report. Links that it was not asked to measure are ignored: each may change ways, and the plan."""
    told = check_links(report, session.node, transition.state.members.sessions)
    reported = {name for link in report.links for name in (link.source, link.destination)}
    due = session.to_measure
    links = tuple(link for link in told if due.get(link.destination if link.source == session.node else link.source))
    if len(links) < len(told):
        transition.log(f"ignored {len(told) - len(links)} links that {session.node} was not asked to measure")
    left = {node: times - (node in reported) for node, times in due.items() if times > (node in reported)}
    transition.set_session(replace(session, to_measure=left))
    for link in links:
        if link.problem:
            transition.log(f"link {link.source} to {link.destination}: {link.problem}")
    if links:
        up, down = check_connection(report)
        reason = _works_again(transition, links)
        transition.emit(ev.LinksMeasured(session.node, links, up=up, down=down, reason=reason))
    # A newcomer's first report answers for all links. Later reports answer for links that it measures again over another way.
    session = transition.state.members.sessions[session.node]
    again = session.probing & transition.state.ledger.reach.ways.get(session.node, {}).keys() - reported
    transition.set_session(replace(session, probing=frozenset(again)))
    ways.measured(transition, session.node, links)


def measure_relays(transition: Transition) -> None:
    """Has relays that others have begun to use measure their connections to nodes that can be dialled."""
    members, ledger = transition.state.members, transition.state.ledger
    used = {way.relay for row in ledger.reach.ways.values() for way in row.values()}
    due = [
        s
        for node in sorted(used)
        if (s := members.sessions.get(node)) and s.admission is Admission.RELAY and not s.probe_until
    ]
    if not due:
        return  # before any work for each member, since members come one by one
    dialled = {other for row in members.dialled.values() for other, known in row.items() if known.way}
    peers = [s for s in members.sessions.values() if s.node in dialled and s.admission not in _NO_PEERS]
    for session in due if peers else ():
        transition.set_session(replace(session, probe_until=transition.now))
        ways.probe(transition, session.node, sorted(peers, key=lambda s: s.node)[:MEASURED_TOGETHER])


def look_again(transition: Transition, link: ev.Link) -> None:
    """The link has become slow. When no plan uses it, steps no longer show its speed, so it is measured again now and then."""
    members, pause = transition.state.members, PROBE_LEASES * transition.state.lease
    if len(members.slow) < MOST_SLOW:
        retry = Retry(transition.now + pause, 2 * pause)
        slow = {pair_of(link.source, link.destination): retry, **members.slow}
        transition.set_members(replace(members, slow=slow))


def measure_slow(transition: Transition) -> None:
    """Has slow links that no plan uses measured again, at ever longer intervals."""
    state, ready = transition.state, set(transition.state.ledger.ready) if transition.state.members.slow else set[str]()
    used, slow = state.ledger.training.codecs, dict(state.members.slow)
    for (one, other), retry in state.members.slow.items():
        if not {one, other} <= ready:
            del slow[one, other]  # a returning node measures its links anyway
        elif transition.now >= retry.due:
            slow[one, other] = Retry(
                transition.now + retry.pause, min(2 * retry.pause, LONGEST_PAUSE_LEASES * state.lease)
            )
            if other not in used.get(one, {}) and one not in used.get(other, {}):
                ways.probe(transition, one, [state.members.sessions[other]])
    if slow != state.members.slow:
        transition.set_members(replace(transition.state.members, slow=slow))


def _works_again(transition: Transition, links: Collection[ev.Link]) -> str:
    """Why the planner should hear of these measurements: a link that had become slow is fast again. Empty: it need not."""
    known, members = transition.state.ledger.reach.links, transition.state.members
    for link in links:
        pair, before = pair_of(link.source, link.destination), known.get(link.source, {}).get(link.destination)
        if pair in members.slow and before is not None and link.bandwidth >= TIMES_FASTER * before.bandwidth > 0:
            slow = {each: retry for each, retry in members.slow.items() if each != pair}
            transition.set_members(replace(members, slow=slow))
            times = link.bandwidth / before.bandwidth
            return f"measured again, the link from {link.source} to {link.destination} is {times:.1f} times faster than before"
    return ""
