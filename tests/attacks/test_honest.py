"""No honest node is accused, however unlike the nodes' devices are, while nodes come and go: tests/bench/honest.py in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.honest import LEGS, Leg, run_leg


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("leg", [LEGS[0], LEGS[5]], ids=lambda leg: leg.name)
def test_honest_nodes_that_come_to_other_bits_are_not_accused(tmp_path: Path, leg: Leg) -> None:
    found = run_leg(leg, 300, 0.1, 1, tmp_path)
    assert found.fair, found
    assert found.steps == 300
    assert found.audits > 50
    assert found.unequal, "where all bits are equal, nothing is shown"
    assert found.kills
