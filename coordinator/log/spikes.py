"""The last losses of a run, of steps and of evaluations, and the spikes that were told of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

Kind = Literal["training", "held-out"]

WINDOW = 64
"""The number of losses that are remembered."""

CALM = 4
"""A spike is over after so many losses in a row that are not above its limit."""


@dataclass(frozen=True, slots=True)
class Recent:
    """Losses of one kind, and the spike that goes on."""

    losses: tuple[tuple[int, float], ...] = ()
    """Each with its step, the last WINDOW."""
    spiked: int = 0
    """The step in which the spike that goes on was told; 0: none goes on."""
    limit: float = 0.0
    """Above which the loss counts as part of it."""

    def with_loss(self, step: int, loss: float) -> Recent:
        """A spike that lasts until no loss from before it is remembered is usual by then."""
        losses = (*self.losses, (step, loss))[-WINDOW:]
        calm = len(losses) >= CALM and all(each <= self.limit for _, each in losses[-CALM:])
        goes_on = self.spiked and losses[0][0] <= self.spiked and not calm
        return replace(self, losses=losses) if goes_on else Recent(losses)

    def back_to(self, step: int) -> Recent:
        """After training went back to this step."""
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
    """Since step ``since`` the loss has been above ``limit``; it was about ``usual`` before. Each spike is told once. ``back_to``
    is the newest step before it to which training can go back. ``learning_rate``: of the run file, as it is in force."""

    step: int
    kind: Kind
    loss: float
    usual: float
    limit: float
    since: int
    back_to: int
    learning_rate: float
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
