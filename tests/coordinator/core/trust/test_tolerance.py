"""How far the results of two honest devices may be from each other."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from dtfm.coordinator.core.trust.tolerance import PRECISIONS, tolerance
from dtfm.protos.run_file.train_table import Train


def test_every_precision_of_the_run_file_has_one() -> None:
    assert PRECISIONS.keys() | {"auto"} == set(get_args(Train.model_fields["precision"].annotation))


@pytest.mark.parametrize("codec", ["off", "raw16", "i8b256", "i4b64"])
def test_a_bias_of_five_percent_is_found_in_fp32_and_rounding_is_not(codec: str) -> None:
    assert 1e-3 <= tolerance("fp32", codec) < 0.05
    assert tolerance("fp64", codec) < 1e-3
    assert tolerance("bf16", codec) < 0.25, "zeros, repeats and flipped signs are found anywhere"


@pytest.mark.parametrize(("bits", "block", "codec"), [(8, 256, "i8b256"), (4, 64, "i4b64")])
@pytest.mark.parametrize(("precision", "apart"), [("fp32", 3e-4), ("bf16", 2e-2)])
def test_a_small_difference_that_a_codec_makes_larger_is_within_it(
    bits: int, block: int, codec: str, precision: str, apart: float
) -> None:
    random = np.random.default_rng(0)
    mine = random.standard_normal((400, block))
    its = mine + apart * random.standard_normal(mine.shape)
    levels = 2 ** (bits - 1) - 1

    def rounded(x: np.ndarray) -> np.ndarray:
        step = abs(x).max(axis=1, keepdims=True) / levels
        return np.asarray(np.round(x / step) * step)

    error = float(np.linalg.norm(rounded(its) - rounded(mine)) / np.linalg.norm(rounded(mine)))
    assert apart < error < tolerance(precision, codec)
