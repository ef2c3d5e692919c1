"""What plans are made with, corrected by what training itself shows. Nothing is probed.

- A device is compared with what it is planned with: its share of a step's FLOPs, over the seconds that it votes.
- A link is compared with itself under the same plan, when it carries the same beside the same others. So it does not matter that
  it is shared.
- A step is compared with what it is expected to take, once devices do as planned. What it takes longer is the overhead: what the
  scheduler's model leaves out, like the way of votes and commits, and the optimizer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dtfm.coordinator.core.messages import link_message
from dtfm.coordinator.core.phases import Switching
from dtfm.coordinator.core.state import Speeds, State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.admission import MOST_FLOPS
from dtfm.coordinator.core.validation.links import MOST_BANDWIDTH
from dtfm.coordinator.core.validation.votes import check_codecs
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.members import planned_flops
from dtfm.coordinator.log.wording import seconds_in_words
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.memory import Checkpointing, Keeping

WINDOW = 5
"""The number of steps whose median counts: a single slow step is noise. A change must also last a lease, so that
with short steps a brief disturbance does not cause a new plan."""

FACTOR = 2.0
"""How many times slower or faster than before a link must be to call for a new plan."""

DEVICE_OFF, STEP_OFF = 1.25, 1.1
"""How many times more or less than planned a device may deliver, or a step take, before that is corrected. Devices may be further
off: each time that one is corrected, the planner looks again."""

LEAST_SECONDS = 0.05
"""Shorter times within a step are not measured: the step does not wait for them."""


def compare(
    speeds: Speeds, speed: float, now: float, lasting: float, factor: float = FACTOR
) -> tuple[Speeds, float | None]:
    """``speeds`` with that of one more step, which ended at ``now``, and by how much they have changed, if that is more than
    ``factor`` and has lasted for ``lasting`` seconds."""
    recent = (*speeds.recent, speed)[-WINDOW:]
    if len(recent) < WINDOW:
        return replace(speeds, recent=recent), None
    level = statistics.median(recent)
    if speeds.first is None:
        return Speeds((), level), None
    ratio = level / speeds.first
    if 1 / factor < ratio < factor:
        return replace(speeds, recent=recent, changed_since=None), None
    since = now if speeds.changed_since is None else speeds.changed_since
    if now - since < lasting:
        return replace(speeds, recent=recent, changed_since=since), None
    return Speeds((), level), ratio


@dataclass(frozen=True, slots=True)
class Part:
    """A node's share of a step, in FLOPs, and the seconds of computing that it votes."""

    work: float
    seconds: float


def parts_of(state: State, votes: Mapping[str, wire.StepReady]) -> dict[str, Part]:
    """By member of the plan that has computed for long enough, in order of name."""
    layers, parts = state.ledger.description.workload.layers, {}
    for stage in state.ledger.training.in_force.stages:
        forward = sum(layer.forward_flops for layer in layers[slice(*stage.layers)])
        keeping = stage.keeping or (Keeping(),) * len(stage.replicas)
        for node, load, kept in zip(stage.replicas, stage.loads, keeping, strict=True):
            vote, work = votes.get(node), (4 if kept.checkpointing is Checkpointing.LAYER else 3) * forward * load
            if vote is not None and node in state.ledger.members and work and vote.compute_seconds >= LEAST_SECONDS:
                parts[node] = Part(work, vote.compute_seconds)
    return dict(sorted(parts.items()))


def committed(transition: Transition, votes: Mapping[str, wire.StepReady]) -> None:
    """What the votes of a committed step show. Nothing is compared while a standby is copying, which shares the links, or while
    the planner is at work, which may share the cores. Nor is a step of which an earlier generation did a part."""
    state, last = transition.state, transition.state.ledger.training.last
    standbys = (session.standby for session in state.members.sessions.values())
    copying = any(standby is not None and standby.caught_up is None for standby in standbys)
    if copying or state.planner.asked is not None or last is None or last.resumed:
        return
    speeds = dict(state.speeds)

    def changed(
        what: tuple[str, str], speed: float, expected: float | None = None, factor: float = FACTOR
    ) -> float | None:
        known = speeds.get(what, Speeds())
        known = known if expected is None else replace(known, first=expected)
        speeds[what], ratio = compare(known, speed, transition.now, state.lease, factor)
        return ratio

    parts, settled = parts_of(state, votes), state.planner.chosen is None
    for (node, part), flops in zip(parts.items(), planned_flops(state.ledger, [*parts]), strict=True):
        if ratio := changed((node, ""), part.work / part.seconds, flops, DEVICE_OFF):
            flops = min(max(flops * ratio, 1.0), MOST_FLOPS)
            transition.emit(ev.DeviceDrifted(node, flops, f"in training it is {_change(ratio)} than planned"))
        settled = settled and bool(speeds[node, ""].recent) and speeds[node, ""].changed_since is None
    for node, vote in sorted(votes.items()):
        for arrived in vote.arrived if node in state.ledger.members else ():  # otherwise it has left since
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
    predicted = state.ledger.training.predicted
    if settled and predicted is not None and last.seconds > 0:
        ratio = changed(("", ""), 1 / last.seconds, 1 / predicted, STEP_OFF)
        if ratio:
            _step_differs(transition, predicted / ratio)
    transition.state = replace(transition.state, speeds=speeds)


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
    bound = None if training.bound is None else training.bound + more
    transition.emit(ev.PlanRepriced(training.generation, training.predicted + more, bound, overhead, reason))


def _link_drifted(transition: Transition, link: ev.Link, ratio: float) -> None:
    reason = f"in training the link from {link.source} is {_change(ratio)} than before"
    transition.emit(ev.LinksMeasured(link.destination, (link,), reason=reason))
    changed = wire.LinksChanged(links=[link_message(link)])
    transition.send([link.source], wire.CoordinatorMessage(links_changed=changed))
    if (session := transition.state.members.sessions.get(link.source)) is not None:
        transition.set_session(replace(session, links_changed=session.links_changed + 1))


def _change(ratio: float) -> str:
    return f"{ratio:.1f} times faster" if ratio > 1 else f"{1 / ratio:.1f} times slower"
