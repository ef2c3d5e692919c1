"""Rounds: several steps of every island, and an exchange. A pure function of a step's number, which coordinator and nodes share.

With ``length`` H, every (H + 1)-th step is an exchange: it trains nothing, and islands agree on one state (DiLoCo, arXiv
2311.08105). It is a step like others: voted on, committed everywhere or nowhere, and done again if a node is lost meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounds:
    """``length``: the steps of a round that train; 0: there are no rounds, every step trains and the run is at rest after it."""

    length: int = 0

    @property
    def stride(self) -> int:
        """The number of steps from one at which the run is at rest to the next."""
        return self.length + 1

    def exchanges(self, step: int) -> bool:
        """Whether this step is an exchange."""
        return self.length > 0 and self.at_rest(step)

    def trained(self, step: int) -> int:
        """How many of the steps up to this one train."""
        return step - step // self.stride if self.length else step

    def at_rest(self, step: int) -> bool:
        """Whether all islands have the same weights after this step: the plan may change, and the state is that of the run."""
        return step % self.stride == 0

    def rested(self, step: int) -> int:
        """The last step up to this one at which the run was at rest."""
        return step - step % self.stride

    def mean_seconds(self, step: float, exchange: float) -> float:
        """Of all steps, exchanges among them, where a step that trains takes ``step`` seconds."""
        return (self.length * step + exchange) / self.stride if self.length else step

    def is_due(self, step: int, every: int) -> bool:
        """Whether something that comes once in ``every`` steps (0: never) comes after this one, at which the run is at rest."""
        return every > 0 and step // every > (step - self.stride) // every


MEASURED = 10, 30, 100
"""Lengths for which it was measured how many more tokens islands need (docs/measurements.md)."""


def fitting(steps: int) -> tuple[Rounds, ...]:
    """Rounds near the MEASURED lengths, at most twice and at least half as long. With each, a run of
    this many ``steps`` ends in an exchange."""
    lengths = [stride - 1 for stride in range(3, 2 * MEASURED[-1] + 2) if steps % stride == 0]
    chosen = []
    for measured in MEASURED:
        near = min(lengths, key=lambda length: abs(math.log(length / measured)), default=0)
        if measured <= 2 * near <= 4 * measured and near not in chosen:
            chosen.append(near)
    return tuple(map(Rounds, chosen))


NO_ROUNDS = Rounds()
"""Every step trains, and exchanges gradients."""
