"""The micro-batches that come again."""

from __future__ import annotations

from typing import Any

import pytest

from dtfm.scheduler.model.owed import Owed


@pytest.mark.parametrize(
    "of",
    [
        {"since": -1},
        {"new": -1},
        {"again": ((3, 5),), "new": 4},
        {"again": ((3, 3),), "new": 9},
        {"again": ((3, 5), (4, 6)), "new": 9},
        {"again": ((4, 6), (1, 2)), "new": 9},
        {"again": ((-1, 2),), "new": 9},
    ],
)
def test_ranges_that_nobody_can_have_lost_are_refused(of: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be owed"):
        Owed(**of)
