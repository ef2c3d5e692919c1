"""Checks a log against what the coordinator promises: every step committed once, every sample counted once."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.scheduler.model.rounds import NO_ROUNDS

MOST_FINDINGS = 1000
"""The number of findings that are kept."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that no correct log contains. ``sequence`` is the event's."""

    sequence: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Checked:
    """``steps`` are committed and count; ``redone`` were rolled back and trained again; ``aborted`` were never committed."""

    steps: int
    redone: int
    aborted: int
    samples: int
    tokens: int
    generations: int
    findings: tuple[Finding, ...]


class Checking:
    """Reads a log, event after event, in little memory. It uses the events alone, and not the ledger that the coordinator itself
    uses."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._samples, self._tokens = array("q"), array("q")  # of the steps that count, in order
        self._step = self._generation = self._batch = 0
        self._rounds = NO_ROUNDS
        self._redone = self._aborted = self._generations = 0
        self._over = False
        self._next = 0  # the sequence number that is expected; 0: any
        self._broken = False  # an event is missing: what follows says nothing

    @property
    def result(self) -> Checked:
        return Checked(
            steps=len(self._samples),
            redone=self._redone,
            aborted=self._aborted,
            samples=sum(self._samples),
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
                self._batch = int(event.run.get("train", {}).get("global_batch", 0))
            case ev.StepCommitted():
                self._committed(event, at)
            case ev.RolledBack():
                if event.from_step not in (self._step, event.step):
                    self._find(at, f"it goes back from step {event.from_step}, though the last one is {self._step}")
                gone = min(max(self._step - event.step, 0), len(self._samples))
                del self._samples[len(self._samples) - gone :], self._tokens[len(self._tokens) - gone :]
                self._redone += gone
                self._step = event.step
            case ev.StepAborted():
                self._aborted += 1
            case ev.PlanAdopted():
                self._generations += 1
                if event.generation != self._generation + 1:
                    self._find(at, f"generation {event.generation} follows {self._generation}")
                self._generation, self._rounds = event.generation, event.plan.rounds
            case ev.DigestMismatch():
                self._find(at, f"nodes held different state of what stage {event.stage} trains at step {event.step}")
            case ev.RunFinished() | ev.RunFailed():
                self._over = True

    def _committed(self, event: ev.StepCommitted, at: int) -> None:
        if event.step != self._step + 1:
            self._find(at, f"step {event.step} is committed after step {self._step}")
        if event.generation != self._generation:
            in_force = f"{self._generation} is in force"
            self._find(at, f"step {event.step} is of generation {event.generation}, but {in_force}")
        exchanges = self._rounds.exchanges(event.step)
        if event.exchange != exchanges:
            self._find(
                at, f"step {event.step} is {'an' if event.exchange else 'no'} exchange, against the plan's rounds"
            )
        if event.samples != (due := 0 if exchanges else self._batch):
            self._find(at, f"step {event.step} counts {event.samples} samples, the run says {due}")
        if not (math.isfinite(event.loss) and math.isfinite(event.gradient_norm)):
            self._find(at, f"step {event.step} is committed with loss {event.loss}")
        if self._over:
            self._find(at, f"step {event.step} is committed after the run's end")
        self._samples.append(event.samples)
        self._tokens.append(event.tokens)
        self._step = event.step

    def _find(self, at: int, sentence: str) -> None:
        if not self._broken and len(self._findings) < MOST_FINDINGS:
            self._findings.append(Finding(at, sentence))
