"""Plans for unequal nodes take as long as predicted, and the scheduler's is faster than others by as much.

Seconds are compared with seconds, so nothing else may use the machine meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.wan.unequal import Measured, against_random_plans

pytestmark = [pytest.mark.usefixtures("emulation"), pytest.mark.soak]
OFF, GAIN_OFF = 1.25, 1.2
"""How many times more or less than predicted a step may take, and a gain may be."""


def assert_as_predicted(measured: Iterable[Measured]) -> None:
    """``measured``: the scheduler's plan, then others."""
    searched, *others = measured
    assert 1 / OFF <= searched.ratio <= OFF, searched
    for other in others:
        assert searched.seconds < other.seconds, (searched, other)
        assert 1 / GAIN_OFF <= searched.gain(other) <= GAIN_OFF, (searched, other)


def test_a_step_takes_as_long_as_predicted_and_other_plans_are_slower(tmp_path: Path) -> None:
    """tests/bench/unequal_run.py is the long form of this."""
    assert_as_predicted(against_random_plans(tmp_path, (20, 28), 3, micro_batches=12, shared_lines=False))
