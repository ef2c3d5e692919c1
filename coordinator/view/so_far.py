"""The run so far: what `watch` and the page show of it, given the records of the log up to one of them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.trust import MOST_KNOWN
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.for_people import is_for_people

RECENT_STEPS = 20
"""Number of steps that tokens/s is averaged over."""
RECENT_EVENTS = 30

STATES = ("waiting", "training", "paused", "finished", "failed")

STALL_LEASES, STALL_STEPS = 30, 5
"""A commit is long overdue after STALL_LEASES leases or STALL_STEPS times the last step's seconds, whichever is longer."""

MOVES_ON = ev.RunStarted | ev.RunResumed | ev.RunContinued | ev.RunChanged | ev.StepCommitted | ev.Evaluated
"""From these events on, the next commit is waited for."""


def is_stalled(ledger: Ledger, since: float, now: float) -> bool:
    """Whether a commit is long overdue that has been waited for ``since`` then, in seconds."""
    longest = STALL_LEASES * ledger.run.get("cluster", {}).get("lease", 0.0)
    longest = max(longest, STALL_STEPS * (ledger.training.step_seconds or 0.0))
    return ledger.outcome is None and ledger.hold is None and now - since > longest


@dataclass(frozen=True, slots=True)
class Given:
    """What a node has given to the run: micro-batches of committed steps, and about how many seconds
    it computed for them: a step without times in the log counts like the last one with times."""

    micro_batches: int = 0
    computed: float = 0.0


@dataclass(slots=True)
class SoFar:
    """What the records that were added say of the run as it is after them. Times are in seconds since 1970."""

    ledger: Ledger = field(default_factory=Ledger)
    steps: deque[ev.StepCommitted] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    recent: deque[Record] = field(default_factory=lambda: deque(maxlen=RECENT_EVENTS))
    """The last events of which a person must know, the steps aside."""
    reason: str = ""
    """Why the last plan was adopted."""
    given: dict[str, Given] = field(default_factory=dict)
    """By node, for those that took part in a committed step."""
    events: dict[str, int] = field(default_factory=dict)
    """The number of the log's events, by name."""
    joins: dict[str, int] = field(default_factory=dict)
    """How often each node was let in."""
    lent: float = 0.0
    """See ``lent_until``: until ``last``."""
    cost: float = 0.0
    """Of the same time, by the run file's prices."""
    began: float = 0.0
    """When the run began; 0: it has not."""
    committed: float = 0.0
    """When its last step was committed."""
    awaited: float = 0.0
    """Since when the next commit is waited for."""
    over: float = 0.0
    """When it ended, if it has."""
    last: float = 0.0
    """When the last record was written."""
    sequence: int = 0
    """That record's number."""

    def add(self, record: Record) -> None:
        before, event = self.ledger, record.event
        if not isinstance(event, ev.RunResumed):  # nobody trained while there was no coordinator
            seconds = max(0.0, record.time - self.last)
            self.lent += len(before.members) * seconds
            self.cost += self.hourly_price * seconds / 3600
        self.ledger = event.apply(before)
        self.last, self.sequence, self.began = record.time, record.sequence, self.began or record.time
        self.events[event.event] = self.events.get(event.event, 0) + 1
        if isinstance(event, ev.NodeJoined) and (event.node in self.joins or len(self.joins) < MOST_KNOWN):
            self.joins[event.node] = self.joins.get(event.node, 0) + 1
        if isinstance(event, MOVES_ON):
            self.awaited = record.time
        if isinstance(event, ev.RunFinished | ev.RunFailed):
            self.over = record.time
        if isinstance(event, ev.PlanAdopted):
            self.reason = event.reason
        if isinstance(event, ev.StepCommitted):
            self.steps.append(event)
            self.losses.append(event.loss)
            self.committed = record.time
            self.given |= () if event.exchange else self._given_by(event)
        elif is_for_people(event):
            self.recent.append(record)

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
        """The mean over the same steps."""
        whole = self._whole
        return sum(step.seconds for step in whole) / len(whole) if whole else None

    @property
    def measured(self) -> float | None:
        """Seconds that a step of the plan in force takes: the median of its last ones that ran without interruption."""
        seconds = [step.seconds for step in self._whole if step.generation == self.ledger.training.generation]
        return statistics.median(seconds) if seconds else None

    def elapsed(self, now: float) -> float:
        """The seconds that the run has taken until ``now``, or until it ended."""
        return (self.over if self.ledger.outcome is not None else now) - self.began

    def lent_until(self, now: float) -> float:
        """The node-seconds that all members have given to the run until ``now``."""
        return self.lent + (len(self.ledger.members) * (now - self.last) if self.ledger.outcome is None else 0.0)

    @property
    def hourly_price(self) -> float:
        """Of all members' devices; 0 where the run file has no prices."""
        prices = self.ledger.run.get("cluster", {}).get("prices", {})
        names = [member.device.name.casefold() for member in self.ledger.members.values()] if prices else []
        return sum(next((price for part, price in prices.items() if part.casefold() in name), 0.0) for name in names)

    def left(self, now: float) -> float | None:
        """The seconds that are left by the speed of the last steps; None: the run is over, or no speed is known."""
        mean = self.step_seconds
        if self.ledger.outcome is not None or mean is None:
            return None
        return max(0.0, (self.run_steps - self.ledger.training.step) * mean - (now - self.committed))

    @property
    def run_steps(self) -> int:
        """The number of steps that the run has; 0 before it begins."""
        return int(self.ledger.run.get("train", {}).get("steps", 0))

    @property
    def _whole(self) -> list[ev.StepCommitted]:
        return [step for step in self.steps if step.exchange or step.tokens_per_second is not None]
