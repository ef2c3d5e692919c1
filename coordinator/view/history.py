"""The run's past as pictures: curves over its steps, a lane for each node, and its plans, each up to any event of the log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import Member
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.curves import Reading, reading
from dtfm.coordinator.view.so_far import SoFar

MOST_POINTS = 600
"""The number of points of a curve. When there are more, two neighbours become one."""
MOST_SPANS = 5_000
"""The number of spans of all lanes, and a fifth of it for plans: the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Point:
    """Some steps in a row, or evaluations."""

    sequence: int
    """Of the last step. So are ``step``, ``time`` and ``cost``."""
    step: int
    time: float
    loss: float
    """The mean over ``count`` steps. So are ``norm`` and ``rate``."""
    tokens: int = 0
    """Of the steps that ran without interruption. So are the figures below, unless they say otherwise."""
    seconds: float = 0.0
    """The time for the ``tokens``."""
    count: int = 1
    """The number of steps, or evaluations."""
    norm: float = 0.0
    """The norm of the gradients."""
    rate: float = 0.0
    """The learning rate."""
    predicted: float = 0.0
    """The seconds that the planner expected of steps that took ``measured`` seconds."""
    measured: float = 0.0
    busy: float = 0.0
    """The sum, over ``timed`` steps, of the mean share of the step that nodes computed."""
    timed: int = 0
    cost: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def predicted_over_measured(self) -> float | None:
        return self.predicted / self.measured if self.measured > 0 else None

    @property
    def busy_share(self) -> float | None:
        return self.busy / self.timed if self.timed else None

    def and_then(self, later: Point) -> Point:
        count = self.count + later.count

        def mean(one: float, other: float) -> float:
            return (one * self.count + other * later.count) / count

        return replace(
            later,
            loss=mean(self.loss, later.loss),
            norm=mean(self.norm, later.norm),
            rate=mean(self.rate, later.rate),
            tokens=self.tokens + later.tokens,
            seconds=self.seconds + later.seconds,
            predicted=self.predicted + later.predicted,
            measured=self.measured + later.measured,
            busy=self.busy + later.busy,
            timed=self.timed + later.timed,
            count=count,
        )


def point_of(sequence: int, read: Reading) -> Point:
    """The point of one step."""
    seconds = read.seconds or 0.0
    ratio = read.predicted_over_measured
    return Point(
        sequence,
        read.step,
        read.time,
        read.loss or 0.0,
        read.tokens if seconds else 0,
        seconds,
        norm=read.gradient_norm or 0.0,
        rate=read.learning_rate or 0.0,
        predicted=0.0 if ratio is None else ratio * seconds,
        measured=0.0 if ratio is None else seconds,
        busy=read.busy or 0.0,
        timed=int(read.busy is not None),
        cost=read.cost,
    )


@dataclass(frozen=True, slots=True)
class Adopted:
    """A plan came into force by event ``sequence``, after ``step``."""

    sequence: int
    time: float
    generation: int
    step: int
    reason: str


@dataclass(slots=True)
class Curve:
    """At most MOST_POINTS of the points that were added. Each point stands for ``every`` of them, except the last."""

    points: list[Point] = field(default_factory=list)
    every: int = 1

    def add(self, point: Point) -> None:
        if self.points and self.points[-1].count < self.every:
            self.points[-1] = self.points[-1].and_then(point)
            return
        if len(self.points) == MOST_POINTS:
            self.points = [a.and_then(b) for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self.every *= 2
        self.points.append(point)

    def until(self, sequence: int) -> list[Point]:
        return [point for point in self.points if point.sequence <= sequence]


@dataclass(frozen=True, slots=True)
class Span:
    """What a node did for a stretch of events."""

    node: str
    doing: str
    """"joining" (it reads the run and its data), "measuring" (its links), "switching" (it takes up a plan), "training", "ready"
    (idle or standby), "relays" or "quarantined"."""
    stage: int | None
    """The stage that the node trains; None: it does not train."""
    place: str
    """The stage's name."""
    first: int
    """The event that began the span."""
    began: float
    """Its time."""
    last: int = 0
    """The event that ended the span; 0 while it goes on."""
    ended: float = 0.0
    why: str = ""
    """Why the node left then."""


_STILL = ev.StepCommitted | ev.Evaluated | ev.LinksMeasured | ev.WorkAudited | ev.StateAgreed | ev.SnapshotWritten
"""The frequent events that change nothing about what nodes do."""


@dataclass(slots=True)
class History:
    """The past, from the records that were added."""

    losses: Curve = field(default_factory=Curve)
    held_out: Curve = field(default_factory=Curve)
    plans: deque[Adopted] = field(default_factory=lambda: deque(maxlen=MOST_SPANS // 5))
    _spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MOST_SPANS))
    """The ended spans, in the order of their ends."""
    _open: dict[str, Span] = field(default_factory=dict)
    _timed: set[str] = field(default_factory=set)
    _began: bool = False
    """Whether the plan in force has begun."""

    def add(self, record: Record, so_far: SoFar) -> None:
        """Adds the record. ``so_far`` has it already."""
        event, sequence, time, ledger = record.event, record.sequence, record.time, so_far.ledger
        match event:
            case ev.StepCommitted() if (read := reading(so_far, record)) is not None:
                self.losses.add(point_of(sequence, read))
            case ev.Evaluated():
                self.held_out.add(Point(sequence, event.step, time, event.loss))
            case ev.PlanAdopted():
                self._began = False
                self.plans.append(Adopted(sequence, time, event.generation, event.step, event.reason))
            case ev.PlanStarted():
                self._began = True
            case ev.DeviceTimed():
                self._timed.add(event.node)
            case ev.NodeJoined():
                self._timed.discard(event.node)
        if not isinstance(event, _STILL):
            self._move(record, ledger)

    def spans_until(self, sequence: int) -> list[Span]:
        """The spans as of that event, in the order of their beginnings."""
        known = [span for span in (*self._spans, *self._open.values()) if span.first <= sequence]
        known = [span if span.last <= sequence else replace(span, last=0, ended=0.0, why="") for span in known]
        return sorted(known, key=lambda span: (span.first, span.node))

    def _move(self, record: Record, ledger: Ledger) -> None:
        now: dict[str, tuple[str, int | None, str]] = {}
        if ledger.outcome is None:
            now = {why.node: ("quarantined", None, "") for why in ledger.trust.quarantined.values()}
            plan = ledger.training.plan
            trains = "training" if self._began else "switching"
            now |= {node: (self._doing(node, member), None, "") for node, member in ledger.members.items()}
            if plan is not None:
                for number, stage in enumerate(plan.stages):
                    now |= {node: (trains, number, plan.name_of(number)) for node in stage.replicas if node in now}
        for node, span in list(self._open.items()):
            if now.get(node) == (span.doing, span.stage, span.place):
                continue
            why = record.event.reason if isinstance(record.event, ev.NodeLeft) and record.event.node == node else ""
            self._spans.append(replace(span, last=record.sequence, ended=record.time, why=why))
            del self._open[node]
        for node, does in now.items():
            if node not in self._open:
                self._open[node] = Span(node, *does, record.sequence, record.time)

    def _doing(self, node: str, member: Member) -> str:
        """What a node does if it is not in the plan."""
        if member.relay == "only":
            return "relays"
        return "ready" if member.ready else "measuring" if node in self._timed else "joining"
