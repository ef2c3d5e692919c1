"""Checks a log against what the coordinator promises: every step committed once, every sample counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.store import Record


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


def check(records: Iterable[Record]) -> Checked:
    """Reads a whole log. It uses the events alone, and not the ledger that the coordinator itself uses."""
    records = list(records)
    counting: dict[int, ev.StepCommitted] = {}
    redone = aborted = generations = 0
    for record in records:
        match record.event:
            case ev.StepCommitted() as committed:
                counting[committed.step] = committed
            case ev.RolledBack(step=step):
                gone = [s for s in counting if s > step]
                redone += len(gone)
                for s in gone:
                    del counting[s]
            case ev.StepAborted():
                aborted += 1
            case ev.PlanAdopted():
                generations += 1
    return Checked(
        steps=len(counting),
        redone=redone,
        aborted=aborted,
        samples=sum(step.samples for step in counting.values()),
        tokens=sum(step.tokens for step in counting.values()),
        generations=generations,
        findings=tuple(_findings(records)),
    )


def _findings(records: list[Record]) -> Iterator[Finding]:
    step = generation = batch = 0
    over = False
    for expected, record in enumerate(records, records[0].sequence if records else 1):
        event, at = record.event, record.sequence
        if at != expected:
            yield Finding(at, f"event {expected} is missing")
            return
        match event:
            case ev.RunStarted() | ev.RunResumed():
                over = False
                batch = int(event.run.get("train", {}).get("global_batch", 0))
            case ev.StepCommitted():
                if event.step != step + 1:
                    yield Finding(at, f"step {event.step} is committed after step {step}")
                if event.generation != generation:
                    yield Finding(
                        at, f"step {event.step} is of generation {event.generation}, but {generation} is in force"
                    )
                if event.samples != batch:
                    yield Finding(at, f"step {event.step} counts {event.samples} samples, the run says {batch}")
                if not (math.isfinite(event.loss) and math.isfinite(event.gradient_norm)):
                    yield Finding(at, f"step {event.step} is committed with loss {event.loss}")
                if over:
                    yield Finding(at, f"step {event.step} is committed after the run's end")
                step = event.step
            case ev.RolledBack():
                if event.from_step != step and event.from_step != event.step:
                    yield Finding(at, f"it goes back from step {event.from_step}, though the last one is {step}")
                step = event.step
            case ev.PlanAdopted():
                if event.generation != generation + 1:
                    yield Finding(at, f"generation {event.generation} follows {generation}")
                generation = event.generation
            case ev.DigestMismatch():
                yield Finding(at, f"replicas of stage {event.stage} held different state at step {event.step}")
            case ev.RunFinished() | ev.RunFailed():
                over = True
