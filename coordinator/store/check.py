"""Checks a log against the coordinator's promises: every step is committed once, and every sample counts once. A sample comes
again only if an island had lost it."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.debts import Debts
from dtfm.coordinator.store.record import Record
from dtfm.scheduler.model.owed import total
from dtfm.scheduler.model.plan import Plan

MOST_FINDINGS = 1000
"""The most findings to keep."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that no correct log contains. ``sequence`` is the event's number."""

    sequence: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check."""

    steps: int
    """Committed steps that count."""
    redone: int
    """Steps that were rolled back and trained again."""
    aborted: int
    """Steps that were never committed."""
    samples: int
    owed: int
    """Of the ``samples``, the ones that were lost with an island and have not come again."""
    tokens: int
    generations: int
    findings: tuple[Finding, ...]


class Checking:
    """Reads a log, event after event, in little memory. It uses the events alone. Of the coordinator's own ledger it uses only
    the debts."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._samples, self._tokens = array("q"), array("q")  # of the steps that count, in order
        self._step = self._batches = self._generation = self._batch = self._micro_batch = 0
        self._grows = False
        self._plan: Plan | None = None
        self._debts = Debts()
        self._redone = self._aborted = self._generations = 0
        self._over = False
        self._next = 0  # the expected sequence number; 0: any
        self._broken = False  # an event is missing: later events prove nothing

    @property
    def result(self) -> Checked:
        owed, of_batch = self._debts.adopted[-1], self._batch // max(1, self._micro_batch)
        return Checked(
            steps=len(self._samples),
            redone=self._redone,
            aborted=self._aborted,
            samples=sum(self._samples),
            owed=total(owed.left(self._batches, of_batch)) * self._micro_batch,
            tokens=sum(self._tokens),
            generations=self._generations,
            findings=tuple(self._findings),
        )

    def add(self, record: Record) -> None:
        event, at = record.event, record.sequence
        if self._next and at != self._next and not self._broken:
            self._find(at, f"event {self._next} is missing")
            self._broken = True
        self._next = at + 1
        match event:
            case ev.RunStarted() | ev.RunResumed():
                self._over = False
                train = event.run.get("train", {})
                self._batch, self._micro_batch = int(train.get("global_batch", 0)), int(train.get("micro_batch", 0))
                self._grows = bool(train.get("batch_grows"))
            case ev.StepCommitted():
                self._committed(event, at)
            case ev.RolledBack():
                if event.from_step not in (self._step, event.step):
                    self._find(at, f"it goes back from step {event.from_step}, though the last one is {self._step}")
                gone = min(max(self._step - event.step, 0), len(self._samples))
                undone = sum(self._samples[len(self._samples) - gone :]) // max(1, self._batch)
                before = event.step - event.exchanges + event.ahead  # of another log
                self._batches = self._batches - undone if event.step <= self._step else before
                self._debts = self._debts.back_to(self._batches)
                del self._samples[len(self._samples) - gone :], self._tokens[len(self._tokens) - gone :]
                self._redone += gone
                self._step = event.step
            case ev.StepAborted():
                self._aborted += 1
            case ev.PlanAdopted():
                self._generations += 1
                if event.generation != self._generation + 1:
                    self._find(at, f"generation {event.generation} follows {self._generation}")
                self._generation, self._plan = event.generation, event.plan
                if event.plan.rounds.batches(self._step) != self._batches:
                    counted = f"{event.plan.rounds.batches(self._step)} batches, but {self._batches} are trained"
                    self._find(at, f"plan {event.generation} goes on after {counted}")
                if event.plan.rounds.batches_each > 1 and not self._grows:
                    self._find(at, f"plan {event.generation} has a larger batch than the run says")
                if event.plan.owed != self._debts.under(event.plan, self._batches):
                    self._find(at, f"plan {event.generation} does not train again what an island has lost")
                if event.moments is not None and event.plan.counted != self._debts.counted(event.plan, self._batches):
                    self._find(
                        at, f"plan {event.generation} does not count what its islands have trained since the exchange"
                    )
                if unknown := {*(event.moments or {}).values()} - self._debts.of_round.keys():
                    whose = ", ".join(map(str, sorted(unknown)))
                    self._find(
                        at, f"plan {event.generation} begins an island with the moments of {whose}, which has none"
                    )
                self._debts = self._debts.with_plan(event.plan)
            case ev.DigestMismatch():
                self._find(at, f"nodes held different state of stage {event.stage} at step {event.step}")
            case ev.RunFinished() | ev.RunFailed():
                self._over = True

    def _committed(self, event: ev.StepCommitted, at: int) -> None:
        if event.step != self._step + 1:
            self._find(at, f"step {event.step} is committed after step {self._step}")
        if event.generation != self._generation:
            in_force = f"{self._generation} is in force"
            self._find(at, f"step {event.step} is of generation {event.generation}, but {in_force}")
        exchanges = self._plan is not None and self._plan.rounds.exchanges(event.step)
        if event.exchange != exchanges:
            self._find(
                at, f"step {event.step} is {'an' if event.exchange else 'no'} exchange, against the plan's rounds"
            )
        if event.looked is not None and event.outer != event.looked.best:
            self._find(at, f"step {event.step} applied {event.outer}, but {event.looked.best} had the least loss")
        batches = self._plan.rounds.batches_each if self._plan is not None else 1
        if event.samples != (due := 0 if exchanges else batches * self._batch):
            self._find(at, f"step {event.step} counts {event.samples} samples, the run says {due}")
        if not (math.isfinite(event.loss) and math.isfinite(event.gradient_norm)):
            self._find(at, f"step {event.step} is committed with loss {event.loss}")
        if self._over:
            self._find(at, f"step {event.step} is committed after the run's end")
        self._samples.append(event.samples)
        self._tokens.append(event.tokens)
        self._step = event.step
        if self._plan is not None:
            at_rest = self._plan.rounds.at_rest(event.step)
            self._debts = self._debts.with_step(self._plan, self._batches, event.learning_rate, at_rest=at_rest)
        self._batches += 0 if exchanges else batches

    def _find(self, at: int, sentence: str) -> None:
        if not self._broken and len(self._findings) < MOST_FINDINGS:
            self._findings.append(Finding(at, sentence))
