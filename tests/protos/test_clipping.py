from __future__ import annotations

import pytest

from dtfm.protos.clipping import clip_coefficient


def test_clipping_scales_to_the_bound_and_leaves_small_gradients_alone() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25)
    assert clip_coefficient(4.0, 0.0) == 1.0
