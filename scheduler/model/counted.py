"""How much each island counts in an exchange: a pure function of the plan, which coordinator and nodes share.

An island counts by the micro-batches that it has trained since the last exchange. So an island that begins within a round, from
the weights of the last exchange, does not hold back the others, which have trained longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtfm.scheduler.model.rounds import Rounds


@dataclass(frozen=True, slots=True)
class Counted:
    """After the run's first ``since`` batches, each island ``had`` trained this number of micro-batches since the last
    exchange. ``had``: pairs of island and number, in ascending order. Islands that are left out had trained none."""

    since: int = 0
    had: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        islands = [island for island, _ in self.had]
        if islands != sorted({*islands}) or min(self.since, *(n for pair in self.had for n in pair), 0) < 0:
            raise ValueError(f"{self.had} cannot be what islands have trained after {self.since} batches")

    def weights(self, rounds: Rounds, shares: Mapping[int, int], step: int) -> dict[int, float]:
        """By island, its part of the sum in the exchange ``step``. The parts add up to 1. ``shares``: by island, the
        micro-batches of a step that it computes since then."""
        began = rounds.batches(rounds.rested(step - 1))
        had = dict(self.had) if self.since > began else {}
        steps = (rounds.batches(step) - max(began, self.since)) // rounds.batches_each
        counts = {island: had.get(island, 0) + steps * share for island, share in shares.items()}
        if not any(counts.values()):
            counts = dict(shares)  # nobody has trained anything, and nothing has changed
        whole = sum(counts.values())
        return {island: count / whole for island, count in counts.items()}


NOTHING_COUNTED = Counted()
"""All islands of the plan have trained since the last exchange, or since the plan was adopted."""
