"""How the run fares, in a sentence and a colour: the first line of the page and of `watch`."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from dtfm.coordinator.log.unaudited import cannot_be_audited, describe_unaudited
from dtfm.coordinator.log.wording import MOST_NAMED, seconds_in_words
from dtfm.coordinator.view.so_far import SoFar, is_stalled
from dtfm.protos.printable import counted

LATE_STEPS = 3.0
"""A step is late when it has taken this many times as long as the last ones, plus a lease."""
STEP_SLOW = 1.3
"""Steps are slow if they take this number of times the planned seconds."""
FEWEST_STEPS = 3
"""The number of steps of a plan before they are compared with it."""


class Mood(enum.StrEnum):
    """The colour."""

    GOOD = "good"
    WAIT = "wait"
    """Nothing is wrong, and nothing trains."""
    CARE = "care"
    """Somebody should look."""
    BAD = "bad"
    """The run does not make progress."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One sentence on the run. ``since``: when the condition began, in seconds since 1970; None: not known, or all the time."""

    mood: Mood
    text: str
    since: float | None = None


def conditions(so_far: SoFar, now: float) -> list[Condition]:
    """The conditions of the run at that time, the most urgent first: at least one."""
    ledger = so_far.ledger
    if ledger.outcome is not None:
        word, mood = ("finished", Mood.GOOD) if ledger.outcome.completed else ("failed", Mood.BAD)
        return [Condition(mood, f"{word}: {ledger.outcome.reason}")]
    if not ledger.run_id:
        return [Condition(Mood.WAIT, "no run yet")]
    if ledger.hold is not None:
        by = ledger.hold.by
        what = f"is stopped by {by}: it ends once its last step is in a checkpoint"
        paused = f"paused by {by}; `dtfm-coordinator continue` goes on"
        return [Condition(Mood.WAIT, what if ledger.hold.ends else paused, so_far.held_since or None)]
    if so_far.stopped:
        return [
            Condition(Mood.WAIT, f"no coordinator: {so_far.stopped}; `dtfm-coordinator serve` goes on", so_far.last)
        ]
    if so_far.asks:
        return [Condition(Mood.CARE, f"needs an operator: {so_far.said}", so_far.awaited or None)]
    if ledger.training.plan is None:
        return [_waits(so_far)]
    if not so_far.begun:
        first = ledger.training.step == 0
        what = "get ready for it" if first else "fetch the state of their layers"
        return [Condition(Mood.WAIT, f"takes up plan {ledger.training.generation}: its nodes {what}", so_far.adopted)]
    found = list(_while_it_trains(so_far, now)) or [_as_planned(so_far)]
    told = describe_unaudited(cannot_be_audited(ledger))
    return [*found, Condition(Mood.CARE, told, so_far.adopted or None)] if told else found


@dataclass(frozen=True, slots=True)
class Fitness:
    """The answer for a supervisor. ``healthy``: the run makes progress, or waits for nodes or people. False: the run has
    failed, its next commit is long overdue, or the log cannot be written."""

    healthy: bool
    state: str
    step: int
    reason: str


def fitness(so_far: SoFar, now: float, problem: str = "") -> Fitness:
    """``problem``: why the coordinator itself is not well; empty: it is well."""
    first = conditions(so_far, now)[0]
    healthy = not problem and first.mood is not Mood.BAD
    return Fitness(healthy, so_far.state, so_far.ledger.training.step, problem or first.text)


def _while_it_trains(so_far: SoFar, now: float) -> Iterator[Condition]:
    ledger, training = so_far.ledger, so_far.ledger.training
    waited, measured = now - so_far.awaited, so_far.step_seconds
    lease = ledger.run.get("cluster", {}).get("lease", 0.0)
    if is_stalled(ledger, so_far.awaited, now):
        usual = f"; steps took {seconds_in_words(measured)}" if measured else ""
        yield Condition(Mood.BAD, f"stands still: step {training.step + 1:,} does not end{usual}", so_far.awaited)
    elif measured is not None and waited > LATE_STEPS * measured + lease:
        usual = seconds_in_words(measured)
        yield Condition(Mood.CARE, f"late: step {training.step + 1:,} goes on; steps took {usual}", so_far.awaited)
    if (step := so_far.trend.rises_since) is not None:
        level, low = so_far.trend.level, so_far.trend.low
        yield Condition(Mood.CARE, f"loss rises since step {step:,}, from about {low:.3g} to {level:.3g}")
    elif (step := so_far.held_out.rises_since) is not None:
        low = so_far.held_out.low or 0.0
        what = f"held-out loss rises since step {step:,}, from {low:.3g} to {so_far.held_out.last:.3g}"
        yield Condition(Mood.CARE, f"{what}: the model may learn its data by heart")
    yield from _slow(so_far)
    if so_far.unsaved:
        yield Condition(Mood.CARE, f"trains, but the last checkpoint failed: {so_far.unsaved}")


def _slow(so_far: SoFar) -> Iterator[Condition]:
    slow = {node: each for node, each in so_far.slow.items() if each.is_certain}
    step = _against_the_plan(so_far)
    if slow:
        worst, each = max(slow.items(), key=lambda item: (item[1].times, item[0]))
        others = f"; so {'does' if len(slow) == 2 else 'do'} {counted(len(slow) - 1, 'other')}" if len(slow) > 1 else ""
        text = f"slow: {worst} takes {each.times:.1f} times the planned time{others}"
        yield Condition(Mood.CARE, text, min(one.since for one in slow.values()))
    elif step is not None and step[1] >= STEP_SLOW * step[0]:
        planned, took = step
        what = f"slow: a step takes {seconds_in_words(took)}, {seconds_in_words(planned)} were planned"
        yield Condition(Mood.CARE, f"{what}, though no node computes longer than planned: look at the links")


def _as_planned(so_far: SoFar) -> Condition:
    since = so_far.adopted or None
    step = _against_the_plan(so_far)
    if step is None:
        few = len([s for s in so_far.steps if s.generation == so_far.ledger.training.generation]) < FEWEST_STEPS
        return Condition(Mood.GOOD, "training; the first steps of this plan" if few else "training", since)
    planned, took = step
    if planned >= STEP_SLOW * took:
        return Condition(Mood.GOOD, f"training, {planned / took:.1f} times as fast as planned", since)
    return Condition(Mood.GOOD, "training, as planned", since)


def _against_the_plan(so_far: SoFar) -> tuple[float, float] | None:
    """The seconds of a step as planned and as measured. None: one of them is not known."""
    training, took = so_far.ledger.training, so_far.measured
    of_this = [step for step in so_far.steps if step.generation == training.generation]
    if training.predicted is None or took is None or len(of_this) < FEWEST_STEPS:
        return None
    return training.predicted, took


def _waits(so_far: SoFar) -> Condition:
    """The condition while nothing is planned."""

    def does(node: str) -> str:
        usual = "measures its links" if node in so_far.timed else "reads the run and its data"
        return f"{node} ({so_far.ledger.members[node].preparing or usual})"

    ledger, said, since = so_far.ledger, so_far.said, so_far.awaited or None
    needed = ledger.run.get("cluster", {}).get("nodes", 1)
    computing = {node: member for node, member in ledger.members.items() if member.relay != "only"}
    busy = [node for node, member in sorted(computing.items()) if not member.ready]
    if not computing:
        return Condition(Mood.WAIT, f"waits for nodes: none is here{_detail(said)}", since)
    if busy:
        each = [does(node) for node in busy]
        more = f" and {len(each) - MOST_NAMED} more" if len(each) > MOST_NAMED else ""
        return Condition(Mood.WAIT, f"waits for {', '.join(each[:MOST_NAMED])}{more}", since)
    if len(ledger.staying) < needed:
        return Condition(
            Mood.WAIT, f"waits for {counted(needed - len(ledger.staying), 'more node')}{_detail(said)}", since
        )
    if said and "nodes are ready" not in said:
        return Condition(Mood.CARE, f"waits: {said}", since)
    return Condition(Mood.WAIT, "a plan is being made", since)


def _detail(said: str) -> str:
    return f" ({said})" if said else ""
