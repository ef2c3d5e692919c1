"""The run so far, for `watch` and the page, from the records of the log up to one of them."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import planned_flops
from dtfm.coordinator.log.trust import MOST_KNOWN
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.condition.pace import Slow, planned_seconds, slow_after, times_planned
from dtfm.coordinator.view.condition.trend import HeldOut, Trend
from dtfm.coordinator.view.for_people import Severity, is_for_people, severity
from dtfm.coordinator.view.out_of_use import OutOfUse
from dtfm.scheduler.model.plan import Plan

RECENT_STEPS = 20
"""Number of steps that tokens/s is averaged over."""
RECENT_EVENTS = 30

STATES = ("waiting", "training", "paused", "finished", "failed")

STALL_LEASES, STALL_STEPS = 30, 5
"""A commit is long overdue after STALL_LEASES leases or STALL_STEPS times the last step's seconds, whichever is longer."""

MOVES_ON = ev.RunStarted | ev.RunResumed | ev.RunContinued | ev.RunChanged | ev.StepCommitted | ev.Evaluated
"""From these events on, the next commit is waited for."""


def is_stalled(ledger: Ledger, since: float, now: float) -> bool:
    """Whether the next commit is long overdue. It is awaited since ``since``, in seconds."""
    longest = STALL_LEASES * ledger.run.get("cluster", {}).get("lease", 0.0)
    longest = max(longest, STALL_STEPS * (ledger.training.step_seconds or 0.0))
    return ledger.outcome is None and ledger.hold is None and now - since > longest


@dataclass(frozen=True, slots=True)
class Given:
    """A node's gift to the run: micro-batches of committed steps, and about how many seconds it computed for them. If the log
    has no times of a step, the step counts like the last one with times."""

    micro_batches: int = 0
    computed: float = 0.0


@dataclass(slots=True)
class SoFar:
    """The run after the records that were added. Times are in seconds since 1970."""

    ledger: Ledger = field(default_factory=Ledger)
    steps: deque[ev.StepCommitted] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    recent: deque[Record] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    """The last events that a person must know about, without the steps."""
    serious: deque[Record] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    """Of these, the last ones that are more than information."""
    reason: str = ""
    """Why the last plan was adopted."""
    plan: Plan | None = None
    """The last plan, whether it is in force or not."""
    adopted: float = 0.0
    """When it was adopted, after step ``adopted_after``."""
    adopted_after: int = 0
    begun: bool = False
    """Whether it has begun."""
    speeds: dict[str, float] = field(default_factory=dict)
    """By node of that plan, the FLOP/s that the plan counted on."""
    slow: dict[str, Slow] = field(default_factory=dict)
    """The nodes that take longer than planned."""
    out_of_use: OutOfUse = field(default_factory=OutOfUse)
    """The nodes and pairs that plans leave out for now."""
    trend: Trend = field(default_factory=Trend)
    """Of the training loss, since training last went back."""
    held_out: HeldOut = field(default_factory=HeldOut)
    timed: set[str] = field(default_factory=set)
    """The members that have read the run and timed their devices."""
    said: str = ""
    """What the coordinator waits for, in its last words since the last plan."""
    asks: bool = False
    """Whether the coordinator waits for an operator's word."""
    held_since: float = 0.0
    """When somebody last asked for a pause."""
    unsaved: str = ""
    """Why the last checkpoint failed; empty: it did not."""
    stopped: str = ""
    """Why the last coordinator has ended. Empty: it runs, as far as the log says."""
    devices: dict[str, str] = field(default_factory=dict)
    """By node that has ever joined, its device's name."""
    given: dict[str, Given] = field(default_factory=dict)
    """By node that took part in a committed step, its gift."""
    events: dict[str, int] = field(default_factory=dict)
    """The number of the log's events, by name."""
    joins: dict[str, int] = field(default_factory=dict)
    """How often each node was let in."""
    lent: float = 0.0
    """The node-seconds until ``last``: see ``lent_until``."""
    lent_by: dict[str, float] = field(default_factory=dict)
    """The same node-seconds by the device's name."""
    kinds: dict[str, int] = field(default_factory=dict)
    """The number of present members by the device's name."""
    began: float = 0.0
    """When the run began; 0: it has not."""
    committed: float = 0.0
    """When its last step was committed."""
    awaited: float = 0.0
    """Since when the next commit is awaited."""
    over: float = 0.0
    """When the run ended, if it has."""
    last: float = 0.0
    """When the last record was written."""
    sequence: int = 0
    """That record's number."""

    def add(self, record: Record) -> None:
        before, event = self.ledger, record.event
        if not isinstance(event, ev.RunResumed):  # nobody trained while there was no coordinator
            seconds = max(0.0, record.time - self.last)
            self.lent += len(before.members) * seconds
            for name, count in self.kinds.items():
                name = name if name in self.lent_by or len(self.lent_by) < MOST_KNOWN else ""
                self.lent_by[name] = self.lent_by.get(name, 0.0) + count * seconds
        self.ledger = event.apply(before)
        if self.ledger.members is not before.members:
            self.kinds = dict(Counter(member.device.name for member in self.ledger.members.values()))
        if self.ledger.health is not before.health or self.ledger.reach is not before.reach:
            self.out_of_use = self.out_of_use.after(event, record.time, self.ledger)
        self.last, self.sequence, self.began = record.time, record.sequence, self.began or record.time
        self.events[event.event] = self.events.get(event.event, 0) + 1
        if isinstance(event, ev.NodeJoined) and (event.node in self.joins or len(self.joins) < MOST_KNOWN):
            self.joins[event.node] = self.joins.get(event.node, 0) + 1
        if isinstance(event, ev.NodeJoined) and (event.node in self.devices or len(self.devices) < MOST_KNOWN):
            self.devices[event.node] = event.device.name
        if isinstance(event, MOVES_ON):
            self.awaited = record.time
        if isinstance(event, ev.RunFinished | ev.RunFailed):
            self.over = record.time
        if isinstance(event, ev.StepCommitted):
            self.steps.append(event)
            self.losses.append(event.loss)
            self.committed, self.begun = record.time, True
            self.given |= () if event.exchange else self._given_by(event)
            self._compare(event, record.time)
        elif is_for_people(event):
            self.recent.append(record)
            if severity(event) > Severity.INFO:
                self.serious.append(record)
        self._note(event, record.time, before)

    def _note(self, event: ev.Event, time: float, before: Ledger) -> None:
        """Keeps facts that the ledger does not keep. ``before``: the ledger before the event."""
        match event:
            case ev.PlanAdopted():
                nodes = [node for node in event.plan.nodes if node in before.members]
                self.speeds = dict(zip(nodes, planned_flops(before, nodes), strict=True))
                self.plan, self.reason, self.adopted, self.adopted_after = event.plan, event.reason, time, event.step
                self.begun, self.slow, self.said, self.asks = False, {}, "", False
            case ev.PlanStarted():
                self.begun = True
            case ev.Waiting():
                self.said, self.asks = event.reason, event.asks
            case ev.Evaluated():
                self.held_out = self.held_out.after(event.step, event.loss)
            case ev.RolledBack():
                self.trend, self.held_out, self.asks = Trend(), HeldOut(), False
            case ev.DeviceTimed():
                self.timed.add(event.node)
            case ev.NodeJoined() | ev.NodeLeft():
                self.timed.discard(event.node)
            case ev.RunPaused():
                self.held_since = time
            case ev.CheckpointFailed():
                self.unsaved = event.reason
            case ev.CheckpointWritten():
                self.unsaved = ""
            case ev.RunStarted() | ev.RunResumed():
                self.stopped, self.said, self.asks = "", "", False
                self.timed.clear()
            case ev.RunStopped() | ev.CoordinatorStopped():
                self.stopped = event.reason

    def _compare(self, step: ev.StepCommitted, time: float) -> None:
        """Compares the step with the steps before it, and with the plan."""
        if step.exchange:
            return
        self.trend = self.trend.after(step.step, step.loss)
        if step.compute_seconds and not step.resumed and self.plan is not None:
            times = times_planned(planned_seconds(self.ledger, self.plan, self.speeds), step)
            self.slow = slow_after(self.slow, times, time)

    def _given_by(self, step: ev.StepCommitted) -> Iterator[tuple[str, Given]]:
        plan, timed = self.ledger.training.plan, self.ledger.training.timed or step
        for stage in plan.stages if plan is not None else ():
            for node, load in zip(stage.replicas, stage.loads, strict=True):
                was = self.given.get(node)
                if was is None and len(self.given) >= MOST_KNOWN:
                    continue
                was = was or Given()
                yield node, Given(was.micro_batches + load, was.computed + timed.compute_seconds.get(node, 0.0))

    @property
    def state(self) -> str:
        """One of STATES."""
        ledger = self.ledger
        if ledger.outcome is not None:
            return "finished" if ledger.outcome.completed else "failed"
        return "paused" if ledger.hold is not None else "waiting" if ledger.training.plan is None else "training"

    @property
    def tokens_per_second(self) -> float | None:
        """The mean over the last steps that ran without interruption; None before the first."""
        whole = self._whole
        return sum(step.tokens for step in whole) / sum(step.seconds for step in whole) if whole else None

    @property
    def step_seconds(self) -> float | None:
        """The mean seconds over the same steps."""
        whole = self._whole
        return sum(step.seconds for step in whole) / len(whole) if whole else None

    @property
    def measured(self) -> float | None:
        """Seconds of a step of the plan in force: the median of its last steps that ran without interruption."""
        seconds = [step.seconds for step in self._whole if step.generation == self.ledger.training.generation]
        return statistics.median(seconds) if seconds else None

    def elapsed(self, now: float) -> float:
        """The seconds that the run has taken until ``now``, or until it ended."""
        return (self.over if self.ledger.outcome is not None else now) - self.began

    def lent_until(self, now: float) -> float:
        """The node-seconds that all members have given to the run until ``now``."""
        return self.lent + (len(self.ledger.members) * (now - self.last) if self.ledger.outcome is None else 0.0)

    @property
    def has_prices(self) -> bool:
        return bool(self.ledger.run.get("cluster", {}).get("prices"))

    @property
    def hourly_price(self) -> float:
        """The price of all members' devices per hour; 0 if the run has no prices."""
        return sum(count * (self._price(name) or 0.0) for name, count in self.kinds.items())

    @property
    def unpriced(self) -> int:
        """The number of members whose device has no price, though others have one."""
        return sum(count for name, count in self.kinds.items() if self._price(name) is None) if self.has_prices else 0

    @property
    def cost(self) -> float:
        """The cost of all devices until ``last``, by the run's present prices."""
        return sum((self._price(name) or 0.0) * seconds / 3600 for name, seconds in self.lent_by.items())

    def _price(self, device: str) -> float | None:
        """The device's price per hour."""
        prices = self.ledger.run.get("cluster", {}).get("prices", {})
        name = device.casefold() if prices else ""
        return next((float(price) for part, price in prices.items() if part.casefold() in name), None)

    @property
    def currency(self) -> str:
        """The currency of the prices. Empty: the run file names none."""
        return str(self.ledger.run.get("cluster", {}).get("currency", ""))

    def whole_cost(self, now: float) -> float | None:
        """The run's cost at its end, if prices and members stay. None: its end is not known."""
        left = self.left(now)
        return None if left is None else self.cost_until(now) + self.hourly_price * left / 3600

    def cost_until(self, now: float) -> float:
        """The cost of all members until ``now``."""
        over = self.ledger.outcome is not None or bool(self.stopped)
        return self.cost + (0.0 if over else self.hourly_price * max(0.0, now - self.last) / 3600)

    def ends(self, now: float) -> float | None:
        """When the run ends at the speed of the last steps. None: not known, because nothing trains."""
        left = self.left(now)
        return None if left is None or self.state != "training" else now + left

    def left(self, now: float) -> float | None:
        """The seconds that are left at the speed of the last steps. None: the run is over, or no speed is known."""
        mean = self.step_seconds
        if self.ledger.outcome is not None or mean is None:
            return None
        return max(0.0, (self.run_steps - self.ledger.training.step) * mean - (now - self.committed))

    @property
    def run_steps(self) -> int:
        """The number of the run's steps, if its rounds stay; 0 before it begins."""
        return self.ledger.training.rounds.end(int(self.ledger.run.get("train", {}).get("steps", 0)))

    @property
    def _whole(self) -> list[ev.StepCommitted]:
        return [step for step in self.steps if step.exchange or step.tokens_per_second is not None]
