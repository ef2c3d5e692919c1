"""Devices and links that have changed since the plan was made, as training itself shows. Nothing is probed.

Each is compared with itself under the same plan, when it does the same work beside the same others. So it does not matter that a
device computes below its peak, or that a link is shared.
That does not show a claim that was false from the beginning: see showing.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from dtfm.coordinator.core.messages import link_message
from dtfm.coordinator.core.phases import Switching
from dtfm.coordinator.core.state import Speeds
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.admission import MOST_FLOPS, check_flops
from dtfm.coordinator.core.validation.links import MOST_BANDWIDTH
from dtfm.coordinator.core.validation.votes import check_codecs
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire

WINDOW = 5
"""The number of steps whose median counts: a single slow step is noise. A change must also last a lease, so that
with short steps a brief disturbance does not cause a new plan."""

FACTOR = 2.0
"""How many times slower or faster than before a device or link must be to call for a new plan."""

LEAST_SECONDS = 0.05
"""Shorter times within a step are not measured: the step does not wait for them."""


def compare(speeds: Speeds, speed: float, now: float, lasting: float) -> tuple[Speeds, float | None]:
    """``speeds`` with that of one more step, which ended at ``now``, and the factor of the change, if one has lasted for
    ``lasting`` seconds."""
    recent = (*speeds.recent, speed)[-WINDOW:]
    if len(recent) < WINDOW:
        return replace(speeds, recent=recent), None
    level = statistics.median(recent)
    if speeds.first is None:
        return Speeds((), level), None
    ratio = level / speeds.first
    if 1 / FACTOR < ratio < FACTOR:
        return replace(speeds, recent=recent, changed_since=None), None
    since = now if speeds.changed_since is None else speeds.changed_since
    if now - since < lasting:
        return replace(speeds, recent=recent, changed_since=since), None
    return Speeds((), level), ratio


def committed(transition: Transition, votes: Mapping[str, wire.StepReady]) -> None:
    """What the votes of a committed step show. While a standby is copying, nothing is compared: it shares the links."""
    standbys = (session.standby for session in transition.state.members.sessions.values())
    if any(standby is not None and standby.caught_up is None for standby in standbys):
        return
    speeds = dict(transition.state.speeds)

    def changed(what: tuple[str, str], speed: float) -> float | None:
        speeds[what], ratio = compare(speeds.get(what, Speeds()), speed, transition.now, transition.state.lease)
        return ratio

    for node, vote in sorted(votes.items()):
        if node not in transition.state.ledger.members:
            continue  # it has left since
        if vote.compute_seconds >= LEAST_SECONDS and (ratio := changed((node, ""), 1 / vote.compute_seconds)):
            _device_drifted(transition, node, transition.state.ledger.members[node].device.flops * ratio, "in training")
        for arrived in vote.arrived:
            link = transition.state.ledger.reach.links.get(arrived.source, {}).get(node)
            if link is None:
                continue
            # Cap the speed at what can be measured, so that a later slowdown still shows.
            cap = arrived.bytes / LEAST_SECONDS
            speed = min(arrived.bytes / max(arrived.seconds, 1e-9), cap)
            first = speeds.get((arrived.source, node), Speeds()).first
            if ratio := changed((arrived.source, node), speed):
                bandwidth = min(link.bandwidth * ratio, MOST_BANDWIDTH)
                if first is not None and first >= cap and ratio < 1:  # the first was capped: the ratio says too little
                    bandwidth = min(bandwidth, speed)
                _link_drifted(transition, replace(link, bandwidth=bandwidth), ratio)
    transition.state = replace(transition.state, speeds=speeds)


def timed_while_idle(transition: Transition, node: str, flops: float) -> None:
    """A node has timed its device again (0: it has not). While it trains, that timing would mean nothing."""
    plan, known = transition.state.ledger.training.plan, transition.state.ledger.members[node].device.flops
    if not flops or (plan is not None and node in plan.nodes):
        return
    check_flops(flops)
    speeds, idle = dict(transition.state.speeds), (" ", node)  # no name is a space
    before = speeds.get(idle, Speeds(first=known))
    speeds[idle], ratio = compare(before, flops, transition.now, transition.state.lease)
    transition.state = replace(transition.state, speeds=speeds)
    if ratio and before.first:
        _device_drifted(transition, node, before.first * ratio, "while idle")


def codecs_chosen(transition: Transition, node: str, message: wire.CodecsChosen) -> None:
    """A node's answer to LinksChanged, if that changed its codecs. Its links carry other numbers of bytes from now on."""
    ledger, plan = transition.state.ledger, transition.state.ledger.training.plan
    if isinstance(transition.state.phase, Switching) or message.generation != ledger.training.generation:
        return  # its codecs under the next plan come with its PlanReady
    if plan is None or node not in plan.nodes:
        return
    session = transition.state.members.sessions[node]
    if not session.links_changed:
        transition.log(f"ignored codecs of {node}, as none of its links has changed since it chose them")
        return
    transition.emit(ev.CodecsChosen(node, check_codecs(message.codecs, plan, node, transition.state.run.network)))
    transition.set_session(replace(session, links_changed=session.links_changed - 1))
    devices_and_others = {what: s for what, s in transition.state.speeds.items() if what[0] != node or not what[1]}
    transition.state = replace(transition.state, speeds=devices_and_others)


def forget(transition: Transition) -> None:
    """Speeds under another plan cannot be compared with earlier ones."""
    transition.state = replace(transition.state, speeds={})


def _device_drifted(transition: Transition, node: str, flops: float, where: str) -> None:
    flops = min(max(flops, 1.0), MOST_FLOPS)
    before = transition.state.ledger.members[node].device.flops
    transition.emit(ev.DeviceDrifted(node, flops, f"{where} it is {_change(flops / before)} than before"))


def _link_drifted(transition: Transition, link: ev.Link, ratio: float) -> None:
    reason = f"in training the link from {link.source} is {_change(ratio)} than before"
    transition.emit(ev.LinksMeasured(link.destination, (link,), reason=reason))
    changed = wire.LinksChanged(links=[link_message(link)])
    transition.send([link.source], wire.CoordinatorMessage(links_changed=changed))
    if (session := transition.state.members.sessions.get(link.source)) is not None:
        transition.set_session(replace(session, links_changed=session.links_changed + 1))


def _change(ratio: float) -> str:
    return f"{ratio:.1f} times faster" if ratio > 1 else f"{1 / ratio:.1f} times slower"
