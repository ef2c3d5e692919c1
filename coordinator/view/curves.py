"""A run's figures by step, for curves: one pure projection for the page, and for trackers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.so_far import SoFar


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one step, or of an evaluation after it. ``time``: in seconds since 1970. None: not known for this step."""

    step: int
    time: float
    loss: float | None = None
    held_out_loss: float | None = None
    """In nats per token."""
    gradient_norm: float | None = None
    """Before clipping."""
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    tokens: int = 0
    """Of this step."""
    seconds: float | None = None
    """Of a step that ran without interruption."""
    busy: float | None = None
    """The mean share of the step that the plan's nodes computed. The log of a long run has it for one step in sixteen."""
    predicted_over_measured: float | None = None
    """The seconds that the planner expected of this step, divided by the measured seconds."""
    cost: float | None = None
    """What all members have cost since the run began, in the currency of ``[cluster] prices``; None: there are no prices."""

    @property
    def values(self) -> dict[str, float]:
        """The figures that are known, by name."""
        known = asdict(self)
        return {name: float(value) for name, value in known.items() if name not in _NO_FIGURES and value is not None}


_NO_FIGURES = ("step", "time", "tokens", "seconds")


def reading(so_far: SoFar, record: Record) -> Reading | None:
    """The record's part in the curves, given the run so far with the record; None: it has none. To read a whole log, add each
    record to ``so_far`` and then call this. An exchange of islands has no reading, because it trains nothing."""
    event, cost = record.event, so_far.cost if so_far.has_prices else None
    if isinstance(event, ev.Evaluated):
        return Reading(event.step, record.time, held_out_loss=event.loss, cost=cost)
    if not isinstance(event, ev.StepCommitted) or event.exchange:
        return None
    whole = event.tokens_per_second is not None
    predicted = so_far.ledger.training.predicted
    spent = [(busy, event.wait_seconds.get(node, 0.0)) for node, busy in event.compute_seconds.items()]
    shares = [busy / (busy + waited) for busy, waited in spent if busy + waited > 0]
    return Reading(
        step=event.step,
        time=record.time,
        loss=event.loss,
        gradient_norm=event.gradient_norm,
        learning_rate=event.learning_rate or None,  # older logs do not have it
        tokens_per_second=event.tokens_per_second,
        tokens=event.tokens,
        seconds=event.seconds if whole else None,
        busy=sum(shares) / len(shares) if shares else None,
        predicted_over_measured=predicted / event.seconds if whole and predicted is not None else None,
        cost=cost,
    )
