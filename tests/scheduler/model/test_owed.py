"""What comes again."""

from __future__ import annotations

import pytest

from dtfm.scheduler.model.owed import Owed


@pytest.mark.parametrize(
    "of", [{"since": -1}, {"again": ((3, 5),), "behind": 1}, {"again": ((3, 3),), "behind": 1}, {"behind": -1}]
    + [{"again": again, "behind": 9} for again in (((3, 5), (4, 6)), ((4, 6), (1, 2)), ((-1, 2),))]
)  # fmt: skip
def test_ranges_that_nobody_can_have_lost_are_refused(of: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="could be owed"):
        Owed(**of)  # type: ignore[arg-type]
