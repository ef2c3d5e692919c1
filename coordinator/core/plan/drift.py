"""Corrects the values that plans are made with, by measurements of training itself. Nothing is probed.

- A device is compared with its planned speed: its share of a step's FLOPs, over the seconds that it votes.
- A link is compared with itself under the same plan, when it carries the same tensors beside the same other traffic. So it does
  not matter that the link is shared.
- A step is compared with its expected time, when devices deliver their planned speed. The rest is overhead: the costs that the
  scheduler's model leaves out, like the transport of votes and commits, and the optimizer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from dtfm.coordinator.core.messages import link_message
from dtfm.coordinator.core.phases import Switching
from dtfm.coordinator.core.plan.noise import WORTH, compare, corrected, deviation, reversals
from dtfm.coordinator.core.reach import links
from dtfm.coordinator.core.state.measured import Speeds
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.admission import MOST_FLOPS
from dtfm.coordinator.core.validation.links import MOST_BANDWIDTH
from dtfm.coordinator.core.validation.votes import check_codecs
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.members import planned_flops
from dtfm.coordinator.log.wording import seconds_in_words
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.memory import Checkpointing, Keeping

FACTOR, MOST_FACTOR = 2.0, 4.0
"""How many times slower or faster than before a link must be to call for a new plan: FACTOR if its measurements hardly differ
from each other, MOST_FACTOR in any case."""

DEVICE_OFF, MOST_DEVICE_OFF = 1.25, 1.5
"""How many times more or less than planned a device must deliver to call for a new plan: likewise."""

STEP_OFF, MOST_STEP_OFF = 1.1, 1.5
"""How many times more or less time than predicted a step must take before the prediction is corrected: likewise."""

MOST_UNCERTAINTY = 0.15
"""The most that a plan must save, as a fraction of a step, even if measurements differ more."""

SURE = 2.0
"""A plan must save this number of standard deviations of its devices' speeds."""

TOGETHER = ("*", "")
"""In ``State.speeds``, the key of `usual_share`."""

LEAST_SECONDS = 0.05
"""Shorter times within a step are not measured: the step does not wait for them."""


@dataclass(frozen=True, slots=True)
class Part:
    """A node's share of a step, in FLOPs, and the seconds of computing that it votes."""

    work: float
    seconds: float


def parts_of(state: State, votes: Mapping[str, wire.StepReady]) -> dict[str, Part]:
    """By member of the plan that has computed for long enough, its part of the step, in order of name."""
    workload, parts = state.ledger.description.workload, dict[str, Part]()
    for stage in state.ledger.training.in_force.stages:
        forward = sum(layer.forward_flops for layer in workload.layers[slice(*stage.layers)])
        keeping = stage.keeping or (Keeping(),) * len(stage.replicas)
        for node, load, kept in zip(stage.replicas, stage.loads, keeping, strict=True):
            passes = workload.passes + (kept.checkpointing is Checkpointing.LAYER)
            vote, work = votes.get(node), passes * forward * load
            if vote is not None and node in state.ledger.members and work and vote.compute_seconds >= LEAST_SECONDS:
                parts[node] = Part(work, vote.compute_seconds)
    return dict(sorted(parts.items()))


def committed(transition: Transition, votes: Mapping[str, wire.StepReady]) -> None:
    """Draws conclusions from the votes of a committed step. Compares nothing while a standby is copying, which shares the
    links, or while the planner is at work, which may share the cores. Nor does it compare a step that an earlier generation
    began."""
    state, last = transition.state, transition.state.ledger.training.last
    standbys = (session.standby for session in state.members.sessions.values())
    copying = any(standby is not None and standby.caught_up is None for standby in standbys)
    if copying or state.planner.asked is not None or last is None or last.resumed:
        return
    speeds = dict(state.speeds)
    devices = [speeds[what].noise for node in votes if (what := (node, "")) in speeds]
    others = statistics.fmean([reversals(noise, transition.now, state.lease) for noise in devices] or [0.0])

    def changed(
        what: tuple[str, str], speed: float, factor: float, most: float, expected: float | None = None
    ) -> float | None:
        known = speeds.get(what, Speeds())
        known = known if expected is None else replace(known, first=expected)
        restless = others if what[0] and not what[1] else 0.0
        speeds[what], ratio = compare(known, speed, transition.now, state.lease, factor, most, restless)
        return ratio

    parts, settled = parts_of(state, votes), state.planner.chosen is None
    planned = dict(zip(parts, planned_flops(state.ledger, [*parts]), strict=True))
    delivered = {node: part.work / part.seconds / planned[node] for node, part in parts.items()}
    usual = usual_share(delivered.values())
    found = {
        node: ratio
        for node, share in delivered.items()
        if (ratio := changed((node, ""), share / usual, DEVICE_OFF, MOST_DEVICE_OFF, 1.0)) is not None
    }
    together = changed(TOGETHER, usual, DEVICE_OFF, FACTOR, 1.0) if parts else None
    if found or together is not None:  # correct every device at once: one question to the planner is enough
        level = together or corrected(speeds[TOGETHER]) or 1.0
        for node in parts:
            ratio = level * (found.get(node) or corrected(speeds[node, ""]) or 1.0)
            if node in found or abs(math.log(ratio)) > WORTH:
                flops = min(max(planned[node] * ratio, 1.0), MOST_FLOPS)
                transition.emit(ev.DeviceDrifted(node, flops, f"in training it is {_change(ratio)} than planned"))
            speeds[node, ""] = replace(speeds[node, ""], recent=(), times=(), changed_since=None)
        speeds[TOGETHER] = replace(speeds[TOGETHER], recent=(), times=(), changed_since=None)
    for what in [(node, "") for node in parts] + [TOGETHER] * bool(parts):
        settled = settled and bool(speeds[what].recent) and speeds[what].changed_since is None
    for node, vote in sorted(votes.items()):
        for arrived in vote.arrived if node in state.ledger.members else ():  # otherwise it has left since
            link = transition.state.ledger.reach.links.get(arrived.source, {}).get(node)
            if link is None:
                continue
            # Cap the speed at what can be measured, so that a later slowdown still shows.
            cap = arrived.bytes / LEAST_SECONDS
            speed = min(arrived.bytes / max(arrived.seconds, 1e-9), cap)
            first = speeds.get((arrived.source, node), Speeds()).first
            if ratio := changed((arrived.source, node), speed, FACTOR, MOST_FACTOR):
                bandwidth = min(link.bandwidth * ratio, MOST_BANDWIDTH)
                if first is not None and first >= cap and ratio < 1:  # the first was capped: the ratio says too little
                    bandwidth = min(bandwidth, speed)
                link_drifted(transition, replace(link, bandwidth=bandwidth), ratio)
    predicted = state.ledger.training.predicted
    if settled and predicted is not None and last.seconds > 0:
        ratio = changed(("", ""), 1 / last.seconds, STEP_OFF, MOST_STEP_OFF, 1 / predicted)
        if ratio:
            _step_differs(transition, predicted / ratio)
    transition.state = replace(transition.state, speeds=speeds)


def usual_share(delivered: Collection[float]) -> float:
    """The median share of their planned speed that devices ``delivered`` in a step. It falls when a machine becomes slower for
    all of its nodes, and stays when one device does. If two shares are in the middle, the share nearer to 1 counts. For one or
    two devices it is 1."""
    if len(delivered) < 3:
        return 1.0
    return min(
        statistics.median_low(delivered), statistics.median_high(delivered), key=lambda share: abs(math.log(share))
    )


def begun(state: State) -> Mapping[tuple[str, str], Speeds]:
    """The speeds when a plan begins. Speeds under another plan cannot be compared and are dropped. Their noise is kept, for
    connected nodes."""
    here = {"", *TOGETHER, *state.ledger.members}
    of_devices_and_links = {what: speeds for what, speeds in state.speeds.items() if what[0] or not what[1]}
    return {what: Speeds(noise=each.noise) for what, each in of_devices_and_links.items() if here.issuperset(what)}


def uncertainty(state: State) -> float:
    """The fraction of a step that another plan must save. With smaller savings, noise may have made the plan look faster."""
    plan, speeds = state.ledger.training.plan, state.speeds
    if plan is None:
        return 0.0
    devices = [deviation(known.noise) for node in plan.nodes if (known := speeds.get((node, ""))) is not None]
    return min(SURE * statistics.median(devices or [0.0]), MOST_UNCERTAINTY)


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


def _step_differs(transition: Transition, seconds: float) -> None:
    """A step takes ``seconds``, which differs from the prediction: corrects the overhead, which is at least 0."""
    training = transition.state.ledger.training
    assert training.predicted is not None
    overhead = max(0.0, training.overhead + seconds - training.predicted)
    if (more := overhead - training.overhead) == 0:
        return
    reason = (
        f"Steps take {seconds_in_words(seconds)}, {seconds_in_words(training.predicted)} were predicted: of each step, "
        f"{seconds_in_words(overhead)} count as overhead from now on."
    )
    bound = training.bound + more if training.bound else None  # 0: there is none
    transition.emit(ev.PlanRepriced(training.generation, training.predicted + more, bound, overhead, reason))


def link_drifted(transition: Transition, link: ev.Link, ratio: float) -> None:
    """Plans with the link's new speed, and has its source choose codecs for that."""
    reason = f"in training the link from {link.source} is {_change(ratio)} than before"
    transition.emit(ev.LinksMeasured(link.destination, (link,), reason=reason))
    if ratio < 1:
        links.look_again(transition, link)
    changed = wire.LinksChanged(links=[link_message(link)])
    transition.send([link.source], wire.CoordinatorMessage(links_changed=changed))
    if (session := transition.state.members.sessions.get(link.source)) is not None:
        transition.set_session(replace(session, links_changed=session.links_changed + 1))


def _change(ratio: float) -> str:
    return f"{ratio:.1f} times faster" if ratio > 1 else f"{1 / ratio:.1f} times slower"
