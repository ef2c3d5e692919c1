"""The run's past as pictures: curves over its steps, a lane for each node, and its plans, each up to any event of the log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import Member
from dtfm.coordinator.store.record import Record

MOST_POINTS = 600
"""The number of points of a curve. Once there are more, each two become one."""
MOST_SPANS = 5_000
"""The number of spans of all lanes, and a fifth of them of plans: the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Point:
    """Some steps in a row, or evaluations. ``sequence``, ``step`` and ``time`` are the last one's; ``loss`` is the mean of
    ``count``. ``tokens`` in ``seconds``: of the steps that ran without interruption."""

    sequence: int
    step: int
    time: float
    loss: float
    tokens: int = 0
    seconds: float = 0.0
    count: int = 1

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    def and_then(self, later: Point) -> Point:
        count = self.count + later.count
        loss = (self.loss * self.count + later.loss * later.count) / count
        tokens, seconds = self.tokens + later.tokens, self.seconds + later.seconds
        return replace(later, loss=loss, tokens=tokens, seconds=seconds, count=count)


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
    """At most MOST_POINTS of the points that were added, each of ``every`` of them, but for the last."""

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
    """What a node did from event ``first`` on, at time ``began``. ``doing``: "joining" (it reads the run and its data),
    "measuring" (its links), "switching" (it takes up a plan), "training" (``stage``, named ``place``), "ready" (idle or standby),
    "relays" or "quarantined". ``last``: the event with which it ended, 0 while it goes on. ``why``: why the node left then."""

    node: str
    doing: str
    stage: int | None
    place: str
    first: int
    began: float
    last: int = 0
    ended: float = 0.0
    why: str = ""


_STILL = ev.StepCommitted | ev.Evaluated | ev.LinksMeasured | ev.WorkAudited | ev.StateAgreed | ev.SnapshotWritten
"""The frequent events after which all nodes do what they did before."""


@dataclass(slots=True)
class History:
    """What the records that were added say of the past."""

    losses: Curve = field(default_factory=Curve)
    held_out: Curve = field(default_factory=Curve)
    plans: deque[Adopted] = field(default_factory=lambda: deque(maxlen=MOST_SPANS // 5))
    _spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MOST_SPANS))
    """Those that ended, in the order in which they did."""
    _open: dict[str, Span] = field(default_factory=dict)
    _timed: set[str] = field(default_factory=set)
    _began: bool = False
    """Whether the plan in force has begun."""

    def add(self, record: Record, ledger: Ledger) -> None:
        """``ledger`` is the fold up to the record."""
        event, sequence, time = record.event, record.sequence, record.time
        match event:
            case ev.StepCommitted():
                whole = event.tokens_per_second is not None
                seconds = event.seconds if whole else 0.0
                self.losses.add(Point(sequence, event.step, time, event.loss, event.tokens * whole, seconds))
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
        """As they were after that event, in the order in which they began."""
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
        """What a node does that is not in the plan."""
        if member.relay == "only":
            return "relays"
        return "ready" if member.ready else "measuring" if node in self._timed else "joining"
