"""Devices and links that are no longer as they were when the plan was made, as training itself shows: no probes.

Each is compared with itself under the same plan, for only then does it do the same work beside the same others. So it does not
matter that a device computes less than its peak, or that a link is shared.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from dtfm.coordinator.core.messages import link_message
from dtfm.coordinator.core.state import Seen, Switching
from dtfm.coordinator.core.transition import Turn
from dtfm.coordinator.core.validation import MOST_BANDWIDTH, MOST_FLOPS, check_codecs, check_flops
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire

WINDOW = 5
"""So many steps are looked at together, by their median: one slow step is noise. And what does not last a lease is, too: short
steps would otherwise make a plan of every hiccup."""

FACTOR = 2.0
"""A device or link must be so many times slower, or faster, than before to be planned with anew."""

LEAST_SECONDS = 0.05
"""What takes less in a step is not measured: it is not what the step waits for."""


def look(seen: Seen, speed: float, now: float, lasting: float) -> tuple[Seen, float | None]:
    """``seen`` with the speed of one more step, which ended at ``now``, and by what factor that has changed, if it has been
    otherwise for ``lasting`` seconds."""
    recent = (*seen.recent, speed)[-WINDOW:]
    if len(recent) < WINDOW:
        return replace(seen, recent=recent), None
    level = statistics.median(recent)
    if seen.before is None:
        return Seen((), level), None
    ratio = level / seen.before
    if 1 / FACTOR < ratio < FACTOR:
        return replace(seen, recent=recent, otherwise_since=None), None
    since = now if seen.otherwise_since is None else seen.otherwise_since
    if now - since < lasting:
        return replace(seen, recent=recent, otherwise_since=since), None
    return Seen((), level), ratio


def committed(turn: Turn, votes: Mapping[str, wire.StepReady]) -> None:
    """What the votes of a committed step show. Whoever has changed is planned with anew. While state is being copied nothing is
    judged: that shares the links."""
    if any(s.copying is not None and not s.copying.near for s in turn.state.sessions.values()):
        return
    seen = dict(turn.state.seen)

    def changed(what: tuple[str, str], speed: float) -> float | None:
        seen[what], ratio = look(seen.get(what, Seen()), speed, turn.now, turn.state.lease)
        return ratio

    for node, vote in sorted(votes.items()):
        if vote.compute_seconds >= LEAST_SECONDS and (ratio := changed((node, ""), 1 / vote.compute_seconds)):
            _device(turn, node, turn.state.ledger.members[node].device.flops * ratio, "in training")
        for arrived in vote.arrived:
            link = turn.state.ledger.links.get(arrived.source, {}).get(node)
            if link is None:
                continue
            what, quickest = (arrived.source, node), arrived.bytes / LEAST_SECONDS
            before = seen.get(what, Seen()).before
            # What came quicker is as good as just so quick; that it was is known when it comes slowly one day.
            speed = min(arrived.bytes / max(arrived.seconds, 1e-9), quickest)
            if ratio := changed(what, speed):
                bandwidth = min(link.bandwidth * ratio, MOST_BANDWIDTH)
                if before is not None and before >= quickest and ratio < 1:  # by how much it is slower is not known
                    bandwidth = min(bandwidth, speed)
                now = replace(link, bandwidth=bandwidth)
                turn.emit(ev.LinksMeasured(node, (now,)))
                turn.send([arrived.source], links_changed=wire.LinksChanged(links=[link_message(now)]))
                _reconsider(turn, node)
    turn.set(seen=seen)


def measured(turn: Turn, node: str, flops: float) -> None:
    """A node has timed its device again (0: it has not); while it trains that would be no measure."""
    plan, known = turn.state.ledger.plan, turn.state.ledger.members[node].device.flops
    if not flops or (plan is not None and node in plan.nodes):
        return
    check_flops(flops)
    if not 1 / FACTOR < flops / known < FACTOR:
        _device(turn, node, flops, "while idle")


def codecs_chosen(turn: Turn, node: str, message: wire.CodecsChosen) -> None:
    """A node's answer to LinksChanged, if that made a difference. Its links carry other bytes now than before."""
    ledger, plan = turn.state.ledger, turn.state.ledger.plan
    if isinstance(turn.state.phase, Switching) or message.generation != ledger.generation:
        return  # what it sends under the next plan comes with its PlanReady
    if plan is None or node not in plan.nodes:
        return
    turn.emit(ev.CodecsChosen(node, check_codecs(message.codecs, plan, node)))
    turn.set(seen={what: seen for what, seen in turn.state.seen.items() if what[0] != node or not what[1]})


def forget(turn: Turn) -> None:
    """Under another plan nothing can be compared with before."""
    turn.set(seen={})


def _device(turn: Turn, node: str, flops: float, where: str) -> None:
    flops = min(max(flops, 1.0), MOST_FLOPS)
    before = turn.state.ledger.members[node].device.flops
    change = f"{flops / before:.1f} times faster" if flops > before else f"{before / flops:.1f} times slower"
    reason = f"{where} it is {change} than before"
    turn.emit(ev.DeviceDrifted(node, flops, reason))
    _reconsider(turn, node)


def _reconsider(turn: Turn, node: str) -> None:
    turn.set(considered=turn.state.considered - {node})
