"""What steps have shown: speeds of devices and links, how far they vary, and gradient norms."""

from __future__ import annotations

import math
from dataclasses import dataclass

StageKey = tuple[int, int, int]
"""A stage: its island, and its layers [first, past_last)."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far the measurements of one device or link differ from each other while nothing has changed (plan/noise.py)."""

    variance: float = 0.0
    """Of the logarithm of its level."""
    count: int = 0
    """The number of levels that are in ``variance``."""
    level: float = 0.0
    """The last of them."""
    at: float = -math.inf
    """When that was."""
    reversals: float = 0.0
    """The number of times that a change was followed by one the other way; it fades."""
    change: float = 0.0
    """The logarithm of the last change; 0 before the first."""
    changed_at: float = 0.0
    """When that was found."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The ``last`` gradient norms of a stage, and whether each was ``large`` for the stage (step/norms.py)."""

    last: tuple[float, ...] = ()
    large: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one device or link in this generation's steps. ``recent``: the last ones, measured at ``times``. ``first``: the
    median of the first ones. ``changed_since``: since when the recent speeds have been far from ``first``. ``noise`` outlives
    the generation."""

    recent: tuple[float, ...] = ()
    first: float | None = None
    changed_since: float | None = None
    times: tuple[float, ...] = ()
    noise: Noise = Noise()
