"""The norms of islands' changes, and of their mean, tell signal and noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.log.spread import MOST_NOISE, noise_of

shares = st.lists(st.integers(1, 9), min_size=2, max_size=8).map(
    lambda loads: {island: load / sum(loads) for island, load in enumerate(loads)}
)


def norms_of(signal: float, noise: float, shares: dict[int, float]) -> tuple[dict[int, float], float]:
    """Those that are expected, of each island and of the mean."""
    return {i: math.sqrt(signal + noise / share) for i, share in shares.items()}, math.sqrt(signal + noise)


@given(signal=st.floats(0.1, 10), noise=st.floats(0, 10), shares=shares)
def test_noise_and_signal_are_found_again(signal: float, noise: float, shares: dict[int, float]) -> None:
    found = noise_of(*norms_of(signal, noise, shares), shares)
    assert found == pytest.approx(noise / signal, rel=1e-6, abs=1e-6)


def test_they_are_found_in_changes_of_many_parameters() -> None:
    random, shares = np.random.default_rng(1), {0: 0.25, 1: 0.25, 2: 0.5}
    signal = random.standard_normal(20_000)
    changes = {i: signal + random.standard_normal(20_000) * math.sqrt(0.3 / share) for i, share in shares.items()}
    mean = sum(shares[i] * change for i, change in changes.items())
    norms = {i: float(np.linalg.norm(change)) for i, change in changes.items()}
    assert noise_of(norms, float(np.linalg.norm(mean)), shares) == pytest.approx(0.3, rel=0.1)


@given(signal=st.floats(0.1, 10), noise=st.floats(0, 10), lie=st.floats(0, 1e6), shares=shares)
def test_one_island_that_lies_stays_among_what_others_say(
    signal: float, noise: float, lie: float, shares: dict[int, float]
) -> None:
    if len(shares) < 3:
        return
    norms, mean = norms_of(signal, noise, shares)
    assert noise_of({**norms, 0: lie}, mean, shares) == pytest.approx(noise / signal, rel=1e-6, abs=1e-6)


@given(norms=st.lists(st.floats(0, 1e9), min_size=2, max_size=5), mean=st.floats(0, 1e9))
def test_whatever_is_said_it_is_a_number_within_bounds(norms: list[float], mean: float) -> None:
    shares = dict.fromkeys(range(len(norms)), 1 / len(norms))
    assert 0 <= noise_of(dict(enumerate(norms)), mean, shares) <= MOST_NOISE
