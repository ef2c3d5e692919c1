"""The last losses of a run, in steps and in evaluations, and the spikes that were reported."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

Kind = Literal["training", "held-out"]

WINDOW = 64
"""The number of losses that are remembered."""

CALM = 4
"""A spike is over after this number of losses in a row that are not above its limit."""


@dataclass(frozen=True, slots=True)
class Recent:
    """Losses of one kind, and the current spike."""

    losses: tuple[tuple[int, float], ...] = ()
    """Each with its step, the last WINDOW."""
    spiked: int = 0
    """The step when the current spike was reported; 0: no spike."""
    limit: float = 0.0
    """A loss above this belongs to the current spike."""

    def with_loss(self, step: int, loss: float) -> Recent:
        """With one more loss. A spike ends when no loss from before it is remembered: by then its losses are usual."""
        losses = (*self.losses, (step, loss))[-WINDOW:]
        calm = len(losses) >= CALM and all(each <= self.limit for _, each in losses[-CALM:])
        goes_on = self.spiked and losses[0][0] <= self.spiked and not calm
        return replace(self, losses=losses) if goes_on else Recent(losses)

    def back_to(self, step: int) -> Recent:
        """The losses after training went back to this step."""
        return Recent(tuple(each for each in self.losses if each[0] <= step))


@dataclass(frozen=True, slots=True)
class Losses:
    training: Recent = field(default_factory=Recent)
    held_out: Recent = field(default_factory=Recent)

    def of(self, kind: Kind) -> Recent:
        return self.training if kind == "training" else self.held_out

    def having(self, kind: Kind, recent: Recent) -> Losses:
        return replace(self, **{kind.replace("-", "_"): recent})

    def back_to(self, step: int) -> Losses:
        return Losses(self.training.back_to(step), self.held_out.back_to(step))


@dataclass(frozen=True, slots=True)
class LossSpiked:
    """The loss spikes. Each spike is reported once."""

    step: int
    """The last committed step."""
    kind: Kind
    """Which loss spikes."""
    loss: float
    """The loss in ``step``."""
    usual: float
    """About the loss before the spike."""
    limit: float
    """The loss has been above this value since ``since``."""
    since: int
    """The first step of the spike."""
    back_to: int
    """The newest step before the spike that training can go back to."""
    learning_rate: float
    """The rate of the run file in force."""
    event: Literal["loss_spiked"] = "loss_spiked"

    def apply(self, ledger: Ledger) -> Ledger:
        recent = replace(ledger.losses.of(self.kind), spiked=self.step, limit=self.limit)
        return replace(ledger, losses=ledger.losses.having(self.kind, recent))

    def narrate(self) -> str:
        where = f"step {self.back_to}" if self.back_to else "the start"
        return (
            f"the {self.kind} loss spikes: {self.loss:.4g} in step {self.step}, where about {self.usual:.4g} is usual; it has "
            f"been above {self.limit:.4g} since step {self.since}. If it does not come down: "
            f"`dtfm-coordinator rollback {self.back_to}` goes back to {where}, and "
            f"`dtfm-coordinator set train.learning_rate={self.learning_rate / 2:.3g}` halves the rate"
        )
