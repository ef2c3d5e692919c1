"""The live terminal view: nodes, links, stages and their replicas, step, loss, tokens/s, recent events. A projection
of the log."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dtfm.coordinator.log.idle import idle_nodes
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import planned_flops
from dtfm.coordinator.log.standing import earned
from dtfm.coordinator.log.wording import describe_routes, describe_seconds, money_in_words, seconds_in_words
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.condition.condition import Condition, Mood, conditions
from dtfm.coordinator.view.members import status
from dtfm.coordinator.view.so_far import SoFar

LEAST_EVENT_ROWS = 3
MOST_NODES = 10
MOST_LINKS = 4
MOST_QUARANTINED = 4
MOST_IDLE = 2
"""The view says why nodes are idle, for at most this number of nodes."""
MOST_SPARKS = 36
"""The number of losses in the line of sparks. It leaves room for the held-out loss."""
_MOODS = {Mood.GOOD: "bold green", Mood.WAIT: "bold yellow", Mood.CARE: "bold yellow", Mood.BAD: "bold red"}
_STYLES = ["cyan", "magenta", "green", "yellow", "blue", "red"]
_SPARKS = "▁▂▃▄▅▆▇█"


def render(so_far: SoFar, console: Console, now: float | None = None) -> RenderableType:
    """One screen of the console; 80 columns and 24 rows suffice for few nodes. ``now``: seconds since 1970; by default the time
    of the last record."""
    ledger = so_far.ledger
    predicted = ledger.training.predicted
    expected = describe_seconds(predicted, ledger.training.bound, so_far.measured)
    if predicted is not None and (taken := so_far.measured) is not None:
        expected += f"; it takes {seconds_in_words(taken)} (predicted/measured {predicted / taken:.2f})"
    upper = Group(
        _head(so_far, so_far.last if now is None else now),
        _nodes(ledger),
        *_idle(ledger),
        _grid(ledger, expected),
    )
    rows = console.height - 3 - len(console.render_lines(upper))  # without the two titles, and the cursor's
    shown = max(1, min(MOST_LINKS, rows - LEAST_EVENT_ROWS))
    events = _events(so_far.recent, console, max(rows - shown, LEAST_EVENT_ROWS))
    return Group(upper, _links(ledger, shown), events)


def live_view(so_far: SoFar, console: Console) -> Live:
    """Shows the run so far on a terminal, four times a second, inside the context."""
    return Live(console=console, refresh_per_second=4, get_renderable=lambda: render(so_far, console, time.time()))


def _head(so_far: SoFar, now: float) -> RenderableType:
    ledger = so_far.ledger
    steps, rate = so_far.run_steps, so_far.tokens_per_second
    verdict, *others = conditions(so_far, now)
    line = Text.assemble(
        (str(ledger.run.get("name", "no run yet")), "bold"),
        f"  step {ledger.training.step:,} of {steps:,}",
        f"  loss {ledger.training.last.loss:.4f}" if ledger.training.last else "",
        f"  {rate:,.0f} tokens/s" if rate is not None else "",
    )
    bar = Table.grid(expand=True)  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=max(steps, 1), completed=ledger.training.step))
    times = Text(f"plan {ledger.training.generation}  {_times(so_far, now)}")
    body: list[RenderableType] = [_told(verdict, now), *(_told(each, now) for each in others), line, bar, times]
    if so_far.has_prices:
        body.append(Text(_cost(so_far, now)))
    told, losses = ledger.evaluated, [*so_far.losses][-MOST_SPARKS:]
    held_out = f"held out {told.loss:.4f} (frequencies {told.unigram_entropy:.4f})" if told is not None else ""
    if held_out or len(losses) > 1:
        spark = f"loss {sparkline(losses)}  " if len(losses) > 1 else ""
        body.append(Text.assemble((spark, "dim"), held_out))
    return Group(*body)


def _times(so_far: SoFar, now: float) -> str:
    """How long the run has gone on, and how long it will go on at the speed of its last steps."""
    left, ends = so_far.left(now), so_far.ends(now)
    told = f"{_clock(so_far.elapsed(now))} elapsed" + (f", {_clock(left)} left" if left is not None else "")
    return told + (f", ends {time.strftime('%a %d %b, %H:%M', time.localtime(ends))}" if ends is not None else "")


def _cost(so_far: SoFar, now: float) -> str:
    whole, currency = so_far.whole_cost(now), so_far.currency
    told = f"{money_in_words(so_far.cost_until(now), currency)} so far"
    if so_far.ledger.outcome is None:
        told += f", {money_in_words(so_far.hourly_price, currency)} an hour"
    told += f", about {money_in_words(whole, currency)} in all" if whole is not None else ""
    return told + (f" ({so_far.unpriced} without a price)" if so_far.unpriced else "")


def _told(condition: Condition, now: float) -> Text:
    """The sentence in its colour, and since when; with the day, if it is another one."""
    since = ""
    if condition.since is not None:
        at, today = time.localtime(condition.since), time.localtime(now)
        same = at[:3] == today[:3]
        since = f", since {time.strftime('%H:%M' if same else '%a %d %b, %H:%M', at)}"
    return Text(f"● {condition.text}{since}", style=_MOODS[condition.mood])


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """One character per value, scaled between the smallest and the largest."""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)


def _nodes(ledger: Ledger) -> RenderableType:
    table = Table(box=None)
    for name in ("node", "does", "GFLOP/s", "GiB", "busy"):
        table.add_column(name, justify="left" if name in ("node", "does") else "right", overflow="fold")
    plan = ledger.training.plan
    shown = list(islice(sorted(ledger.members.items()), MOST_NODES))
    for (node, member), flops in zip(shown, planned_flops(ledger, [name for name, _ in shown]), strict=True):
        stage = plan.stage_of(node) if plan else None
        does = plan.name_of(stage) if plan is not None and stage is not None else status(ledger, node)
        if (its := earned(ledger, node)).is_earned:
            does += f", {its.standing.word}"
        table.add_row(
            Text(node, style=_style(stage)),
            does,
            f"{flops / 1e9:,.0f}",
            f"{member.device.memory_bytes / 2**30:.1f}",
            _busy(ledger, node),
        )
    if (more := len(ledger.members) - MOST_NODES) > 0:
        table.add_row(f"and {more} more", "", "", "", "")
    for why in list(ledger.trust.quarantined.values())[-MOST_QUARANTINED:]:
        table.add_row(Text(why.node, style="red"), Text(f"quarantined: {why.charge}", style="red"), "", "", "")
    return table


def _idle(ledger: Ledger) -> list[RenderableType]:
    """Why the plan does without some nodes."""
    idle = idle_nodes(ledger, sorted(ledger.members)[:MOST_NODES])
    told: list[RenderableType] = [Text(f"{n} is idle: {each.sentence}", style="dim") for n, each in idle.items()]
    return told[:MOST_IDLE]


def _busy(ledger: Ledger, node: str) -> str:
    """Fraction of the last step that the node spent computing, not waiting."""
    timed = ledger.training.timed
    if timed is None or node not in timed.compute_seconds:
        return ""
    whole = timed.compute_seconds[node] + timed.wait_seconds[node]
    return f"{timed.compute_seconds[node] / whole:.0%}" if whole > 0 else ""


def _grid(ledger: Ledger, expected: str) -> RenderableType:
    table = Table(box=None)
    table.add_column("stages")
    table.add_column(expected or "replicas", overflow="fold")
    plan = ledger.training.plan
    if plan is None:
        table.add_row("no plan yet", "")
        return table
    for index, stage in enumerate(plan.stages):
        names = ", ".join(stage.replicas[:6]) + (f" +{len(stage.replicas) - 6}" if len(stage.replicas) > 6 else "")
        name = f"{plan.name_of(index)}: layers {stage.layers[0]}-{stage.layers[1] - 1}"
        table.add_row(name, Text(names, style=_style(index)))
    if len(plan.stages) > len(plan.islands):
        table.add_row("heaviest routes", Text(describe_routes(plan)))
    return table


def _links(ledger: Ledger, most: int) -> RenderableType:
    """The slowest links of the plan; before there is a plan, of all links."""
    table = Table(box=None)
    table.add_column("slowest links", overflow="fold")
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("Mbit/s", justify="right", no_wrap=True)
    table.add_column("way", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    links = [link for row in ledger.reach.links.values() for link in row.values()]
    used = [link for link in links if ledger.training.codecs.get(link.source, {}).get(link.destination)]
    for link in heapq.nsmallest(most, used or links, key=lambda link: (link.bandwidth, -link.latency_seconds)):
        rate = f"{link.bandwidth * 8 / 1e6:,.0f}" if link.bandwidth > 0 else "none"
        codecs = ledger.training.codecs.get(link.source, {}).get(link.destination, {})
        under = "/".join(dict.fromkeys(codec for _, codec in sorted(codecs.items())))
        table.add_row(f"{link.source} → {link.destination}", f"{link.latency_seconds * 1e3:.2f}", rate, link.way, under)
    return table


def _events(recent: deque[Record], console: Console, rows: int) -> RenderableType:
    """The last events, as many as there is room for, but at least one."""
    shown: list[Text] = []
    for record in reversed(recent):
        lines = Text(record.event.narrate()).wrap(console, console.width)
        if shown and len(shown) + len(lines) > rows:
            break
        shown = [*lines, *shown]
    return Group(Text("events", style="bold"), *shown)


def _style(stage: int | None) -> str:
    return _STYLES[stage % len(_STYLES)] if stage is not None else "dim"
