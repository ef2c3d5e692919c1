"""Whether the loss still falls as steeply as at the start of a run. Islands do not begin until then.

Islands that begin at once learn much less from each token than islands that begin when one copy has learnt the simple things:
eight needed 2.5 times the tokens, and from step 300 on 1.4 times (docs/measurements.md). How long the start takes differs from
run to run, so the run's own losses tell. While the loss changes much within a round's worth of steps, copies that train apart
for a round learn the same things in different ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dtfm.coordinator.core.state.state import State

STEPS = 32
"""The fall of the loss is given for this number of steps, about a round."""

STEEP = 0.05
"""In its steep start, a loss falls by more than this part of itself in STEPS."""

LEAST = 32
"""The fewest losses that tell the fall. The means of half as many differ by chance by about a hundredth."""


@dataclass(frozen=True, slots=True)
class Fall:
    """``part``: by which part of itself the loss falls in STEPS. None: there are too few losses to tell."""

    part: float | None

    @property
    def is_steep(self) -> bool:
        return self.part is None or self.part > STEEP

    def narrate(self) -> str:
        if self.part is None:
            return f"Islands wait until {LEAST} steps after the warm-up show that the loss has left its steep start."
        if self.is_steep:
            return (
                f"Islands wait: the loss falls by {self.part:.0%} in {STEPS} steps, and before this is at most {STEEP:.0%} "
                "they would need many more tokens."
            )
        return f"Islands may begin: the loss has left its steep start ({self.part:.1%} in {STEPS} steps)."


def fall_of(losses: Sequence[float]) -> Fall:
    """The fall from the first half of these losses, one a step, to the second."""
    half = len(losses) // 2
    if len(losses) < LEAST:
        return Fall(None)
    before, after = fmean(losses[:half]), fmean(losses[-half:])
    return Fall((before - after) / before * STEPS / half if before > 0 else 0.0)


def steep_start(state: State) -> Fall | None:
    """How the loss falls, where that decides whether islands may begin. None: it does not, as the run file names the rounds,
    rounds are in force, the model was trained before, or there are no two nodes to form islands."""
    run, ledger = state.run, state.ledger
    is_auto = run.train.rounds == "auto" and run.may_have_rounds and not run.model.pretrained
    if not is_auto or state.rounds.count or len(ledger.staying) < 2:
        return None
    recent = ledger.losses.of("training").losses
    return fall_of([loss for step, loss in recent if step > run.train.warmup_steps])
