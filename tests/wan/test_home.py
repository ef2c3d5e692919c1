"""The links of a home are measured right although they share a line that carries less up than down."""

from __future__ import annotations

import pytest

from tests.bench.links import AROUND_HOME, LINE, measure

pytestmark = pytest.mark.usefixtures("emulation")
OFF = 0.75
"""The least part of its rate that a link may be measured with, on a machine that does other things as well."""


@pytest.mark.soak
@pytest.mark.parametrize(("peers", "turns"), [(3, 1), (len(AROUND_HOME), 3)], ids=["3", "7"])
def test_what_comes_down_is_measured_again_if_its_answers_waited_behind_what_went_up(peers: int, turns: int) -> None:
    """Three links already carry more together than the line. Of many links that are measured once, one or the other is measured
    while the machine is busy with something else: the median of several turns is not."""
    down = [row for row in measure(AROUND_HOME[-peers:], LINE, turns) if ", down (" in row.measure]
    assert len(down) == peers
    assert all(row.ratio is not None and OFF < row.ratio < 1.05 for row in down), down
