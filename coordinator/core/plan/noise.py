"""Tells a change of speed from noise, for one device or link at a time. Pure.

A speed has changed when the median of a lease differs from the expected speed by more than a factor, and goes on to do so for a
lease. Earlier measurements raise both limits:

- The factor grows with the noise: how far the medians of successive leases differ.
- After a change and a change back, the next change has to last twice as long. Such reversals are forgotten with time, as routers
  forget that a route was flapping (RFC 2439).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from dtfm.coordinator.core.state.measured import Noise, Speeds

WINDOW = 5
"""The fewest steps whose median counts: a single slow step is noise."""

SAMPLES = 20
"""The number of steps in a lease that are looked at, however short steps are."""

SPREADS = 3.0
"""A change must be this number of standard deviations of the noise."""

MEMORY = 20
"""The number of levels over which the variance is a mean."""

MOST_DIFFERENCE = math.log(2.0)
"""Two successive levels count as at most this far apart: a single wild level must not hide the changes that follow."""

MOST_REVERSALS = 5
"""Changes have to last for at most 2**MOST_REVERSALS times the usual time."""

FORGOTTEN_AFTER = 180.0
"""A reversal is forgotten after this number of times that a change has to last: half an hour with a lease of ten seconds."""


def compare(
    speeds: Speeds,
    speed: float,
    now: float,
    lasting: float,
    factor: float,
    most: float | None = None,
    restless: float = 0.0,
) -> tuple[Speeds, float | None]:
    """Adds the ``speed`` of a step that ended at ``now``. Returns the speeds, and the factor of the change once one is certain.

    ``lasting``: the seconds that a change has to last, at least. ``factor``: the least change that counts; ``most``: the change
    that counts whatever the noise is, by default the same. ``restless``: how often others like it have changed back and forth.
    """
    if speeds.times and now - speeds.times[-1] < lasting / SAMPLES:
        return speeds, None
    recent, times = (*speeds.recent, speed), (*speeds.times, now)
    first_kept = max(0, min(len(times) - WINDOW, sum(time <= now - lasting for time in times)))
    recent, times = recent[first_kept:], times[first_kept:]
    if len(recent) < WINDOW:
        return replace(speeds, recent=recent, times=times), None
    level = statistics.median(recent)
    noise = _with_level(speeds.noise, level, now, lasting)
    if speeds.first is None:
        return Speeds((), level, noise=noise), None
    off = math.log(level / speeds.first)
    if abs(off) < threshold(noise, factor, most):
        return replace(speeds, recent=recent, times=times, changed_since=None, noise=noise), None
    since = now if speeds.changed_since is None else speeds.changed_since
    if now - since < lasting * 2 ** min(reversals(noise, now, lasting) + restless, MOST_REVERSALS):
        return replace(speeds, recent=recent, times=times, changed_since=since, noise=noise), None
    return Speeds((), level, noise=_with_change(noise, off, now, lasting)), level / speeds.first


def threshold(noise: Noise, factor: float, most: float | None = None) -> float:
    """The logarithm of the change that counts."""
    return min(max(math.log(factor), SPREADS * deviation(noise)), math.log(factor if most is None else most))


def deviation(noise: Noise) -> float:
    """The standard deviation of a level's logarithm: about the relative difference of two levels."""
    return math.sqrt(noise.variance)


def reversals(noise: Noise, now: float, lasting: float) -> float:
    """The number of reversals that are not forgotten."""
    return max(0.0, noise.reversals - (now - noise.changed_at) / max(FORGOTTEN_AFTER * lasting, 1e-9))


def corrected(speeds: Speeds) -> float | None:
    """The level, if it differs from the expected level by more than noise does. Then it is corrected together with another
    change. None: no correction is needed."""
    if speeds.first is None or len(speeds.recent) < WINDOW:
        return None
    level = statistics.median(speeds.recent)
    return level if abs(math.log(level / speeds.first)) > max(WORTH, deviation(speeds.noise)) else None


WORTH = math.log(1.05)
"""Smaller differences are not corrected."""


def _with_level(noise: Noise, level: float, now: float, lasting: float) -> Noise:
    """The noise, with one more level if a lease has passed since the last one. Two levels differ by twice the variance of one."""
    if now - noise.at < lasting:
        return noise
    if noise.level <= 0:
        return replace(noise, level=level, at=now)
    difference = min(abs(math.log(level / noise.level)), MOST_DIFFERENCE)
    count = min(noise.count + 1, MEMORY)
    variance = noise.variance + (difference**2 / 2 - noise.variance) / max(count, 3)
    return replace(noise, variance=variance, count=count, level=level, at=now)


def _with_change(noise: Noise, change: float, now: float, lasting: float) -> Noise:
    """The noise after a change was found, which is not noise."""
    back = noise.change * change < 0
    known = min(reversals(noise, now, lasting) + back, MOST_REVERSALS)
    return replace(noise, level=0.0, at=now, reversals=known, change=change, changed_at=now)
