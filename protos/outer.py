"""The outer step: how an exchange of islands applies the sum of their changes (node/model/optimizer.py, `outer_step`)."""

from __future__ import annotations

from dataclasses import dataclass

from dtfm.protos.plan_pb2 import Run

MOST_OUTER_STEPS = 4
"""The most outer steps that an exchange chooses from."""


@dataclass(frozen=True, slots=True)
class OuterStep:
    """``rate``: of the islands' mean change, with its momentum. ``momentum``: Nesterov's."""

    rate: float
    momentum: float

    def __str__(self) -> str:
        return f"rate {self.rate:g}, momentum {self.momentum:g}"


def has_momentum(train: Run.Train) -> bool:
    """Whether the run keeps momentum of exchanges."""
    return train.outer_momentum > 0 or not train.outer_rate
