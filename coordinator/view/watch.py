"""The live terminal view: nodes, links, stages and their replicas, step, loss, tokens/s, recent events. A projection
of the log."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.record import Record
from dtfm.coordinator.log.standing import earned
from dtfm.coordinator.log.wording import describe_routes, describe_seconds
from dtfm.coordinator.view.for_people import is_for_people
from dtfm.coordinator.view.members import status

RECENT_STEPS = 20
"""Number of steps that tokens/s is averaged over."""
RECENT_EVENTS = 10
LEAST_EVENT_ROWS = 3
MOST_NODES = 10
MOST_LINKS = 4
MOST_QUARANTINED = 4
_STYLES = ["cyan", "magenta", "green", "yellow", "blue", "red"]
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class View:
    """What ``watch`` shows, given the records added so far."""

    ledger: Ledger = field(default_factory=Ledger)
    steps: deque[ev.StepCommitted] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    recent: deque[Record] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    expected: str = ""
    """What a step of the plan is expected to take, and what no plan can beat."""
    began: float = 0.0
    committed: float = 0.0
    last: float = 0.0
    """When the run began, when its last step was committed, and when the last record was written, in seconds since 1970."""

    def add(self, record: Record) -> None:
        before = self.ledger.training.plan
        self.ledger = record.event.apply(self.ledger)
        self.last, self.began = record.time, self.began or record.time
        if isinstance(record.event, ev.PlanAdopted):
            said = describe_seconds(record.event.predicted_seconds, record.event.lower_bound_seconds)
            again = before is not None and before.stages == record.event.plan.stages  # it was not planned anew
            self.expected = said or (self.expected if again else "")
        if isinstance(record.event, ev.StepCommitted):
            self.steps.append(record.event)
            self.losses.append(record.event.loss)
            self.committed = record.time
        elif is_for_people(record.event):
            self.recent.append(record)

    @property
    def tokens_per_second(self) -> float | None:
        """The mean over the last steps that ran without interruption; None before the first."""
        whole = self._whole
        return sum(step.tokens for step in whole) / sum(step.seconds for step in whole) if whole else None

    def times(self, now: float) -> str:
        """How long the run has gone on and, by the speed of its last steps, will go on."""
        if self.ledger.outcome is not None:
            return f"{_clock(self.last - self.began)} elapsed"
        elapsed, whole = f"{_clock(now - self.began)} elapsed", self._whole
        if not whole:
            return elapsed
        mean = sum(step.seconds for step in whole) / len(whole)
        left = (self.run_steps - self.ledger.training.step) * mean - (now - self.committed)
        return f"{elapsed}, {_clock(max(left, 0.0))} left"

    @property
    def run_steps(self) -> int:
        """The number of steps that the run has; 0 before it begins."""
        return int(self.ledger.run.get("train", {}).get("steps", 0))

    @property
    def _whole(self) -> list[ev.StepCommitted]:
        return [step for step in self.steps if step.tokens_per_second is not None]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def render(view: View, console: Console, now: float | None = None) -> RenderableType:
    """One screen of the console; 80 columns and 24 rows do for few nodes. ``now``: seconds since 1970; by default, when the last
    record was written."""
    ledger = view.ledger
    upper = Group(
        _head(view, view.last if now is None else now), _nodes(ledger), _grid(ledger, view.expected), _links(ledger)
    )
    rows = console.height - 2 - len(console.render_lines(upper))  # without the title, and the cursor's
    return Group(upper, _events(view.recent, console, max(rows, LEAST_EVENT_ROWS)))


def _head(view: View, now: float) -> RenderableType:
    ledger = view.ledger
    steps, rate = view.run_steps, view.tokens_per_second
    line = Text.assemble(
        (str(ledger.run.get("name", "no run yet")), "bold"),
        f"  step {ledger.training.step:,} of {steps:,}",
        f"  loss {ledger.training.last.loss:.4f}" if ledger.training.last else "",
        f"  {rate:,.0f} tokens/s" if rate is not None else "",
    )
    bar = Table.grid(expand=True)  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=max(steps, 1), completed=ledger.training.step))
    body: list[RenderableType] = [line, bar, Text(f"plan {ledger.training.generation}  {view.times(now)}")]
    if (told := ledger.evaluated) is not None:
        body.append(Text(f"held out {told.loss:.4f} (frequencies {told.unigram_entropy:.4f})"))
    if len(view.losses) > 1:
        body.append(Text("loss " + sparkline(view.losses), style="dim"))
    if ledger.hold is not None:
        body.append(Text(ledger.hold.narrate(), style="bold yellow"))
    if ledger.outcome is not None:
        style = "bold green" if ledger.outcome.completed else "bold red"
        body.append(
            Text(("finished: " if ledger.outcome.completed else "failed: ") + ledger.outcome.reason, style=style)
        )
    return Group(*body)


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """One character per value, scaled between the smallest and the largest."""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)


def _nodes(ledger: Ledger) -> RenderableType:
    table = Table(box=None)
    for name in ("node", "does", "GFLOP/s", "GiB", "busy"):
        table.add_column(name, justify="left" if name in ("node", "does") else "right", overflow="fold")
    for node, member in islice(sorted(ledger.members.items()), MOST_NODES):
        stage = ledger.training.plan.stage_of(node) if ledger.training.plan else None
        does = f"stage {stage}" if stage is not None else status(ledger, node)
        if (its := earned(ledger, node)).is_earned:
            does += f", {its.standing.word}"
        table.add_row(
            Text(node, style=_style(stage)),
            does,
            f"{member.device.flops / 1e9:,.0f}",
            f"{member.device.memory_bytes / 2**30:.1f}",
            _busy(ledger, node),
        )
    if (more := len(ledger.members) - MOST_NODES) > 0:
        table.add_row(f"and {more} more", "", "", "", "")
    for why in list(ledger.trust.quarantined.values())[-MOST_QUARANTINED:]:
        table.add_row(Text(why.node, style="red"), Text(f"quarantined: {why.charge}", style="red"), "", "", "")
    return table


def _busy(ledger: Ledger, node: str) -> str:
    """Fraction of the last step that the node spent computing, not waiting."""
    last = ledger.training.last
    if last is None or node not in last.compute_seconds:
        return ""
    whole = last.compute_seconds[node] + last.wait_seconds[node]
    return f"{last.compute_seconds[node] / whole:.0%}" if whole > 0 else ""


def _grid(ledger: Ledger, expected: str) -> RenderableType:
    table = Table(box=None)
    table.add_column("stages")
    table.add_column(expected or "replicas", overflow="fold")
    for index, stage in enumerate(ledger.training.plan.stages if ledger.training.plan else ()):
        names = ", ".join(stage.replicas[:6]) + (f" +{len(stage.replicas) - 6}" if len(stage.replicas) > 6 else "")
        table.add_row(f"{index}: layers {stage.layers[0]}-{stage.layers[1] - 1}", Text(names, style=_style(index)))
    if ledger.training.plan is None:
        table.add_row("no plan yet", "")
    elif len(ledger.training.plan.stages) > 1:
        table.add_row("heaviest routes", Text(describe_routes(ledger.training.plan)))
    return table


def _links(ledger: Ledger) -> RenderableType:
    """The slowest links of the plan; before there is a plan, of all links."""
    table = Table(box=None)
    table.add_column("slowest links", overflow="fold")
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("Mbit/s", justify="right", no_wrap=True)
    table.add_column("way", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    links = [link for row in ledger.reach.links.values() for link in row.values()]
    used = [link for link in links if ledger.training.codecs.get(link.source, {}).get(link.destination)]
    for link in heapq.nsmallest(MOST_LINKS, used or links, key=lambda link: (link.bandwidth, -link.latency_seconds)):
        rate = f"{link.bandwidth * 8 / 1e6:,.0f}" if link.bandwidth > 0 else "none"
        codecs = ledger.training.codecs.get(link.source, {}).get(link.destination, {})
        under = "/".join(dict.fromkeys(codec for _, codec in sorted(codecs.items())))
        table.add_row(f"{link.source} → {link.destination}", f"{link.latency_seconds * 1e3:.2f}", rate, link.way, under)
    return table


def _events(recent: deque[Record], console: Console, rows: int) -> RenderableType:
    """The last events for which there is room, but at least one."""
    shown: list[Text] = []
    for record in reversed(recent):
        lines = Text(record.event.narrate()).wrap(console, console.width)
        if shown and len(shown) + len(lines) > rows:
            break
        shown = [*lines, *shown]
    return Group(Text("events", style="bold"), *shown)


def _style(stage: int | None) -> str:
    return _STYLES[stage % len(_STYLES)] if stage is not None else "dim"
