"""AdamW on a CPU: one pass over memory, compiled by Numba, which rounds every operation by itself, as IEEE 754 demands.

PyTorch's square root of float32 does not round so on every CPU: MKL's is one bit off for up to a fifth of all numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import types
from numpy.typing import NDArray

from dtfm.kernels.compiling import compiled

Floats = NDArray[np.floating]

_signatures = [types.void(*4 * [kind[::1]], *10 * [kind]) for kind in (types.float32, types.float64)]


def _update(
    parameters: Floats,
    gradients: Floats,
    m: Floats,
    v: Floats,
    keep: np.floating,
    clip: np.floating,
    keep_m: np.floating,
    add_m: np.floating,
    keep_v: np.floating,
    add_v: np.floating,
    to_mean: np.floating,
    to_root: np.floating,
    epsilon: np.floating,
    rate: np.floating,
) -> None:
    """Updates ``parameters`` and the moments ``m`` and ``v`` in place. All are 1-D, contiguous, and of the scalars' dtype,
    float32 or float64. node/model/optimizer/optimizer.py explains the names, and has the same operations for GPUs."""
    for i in range(parameters.size):
        g = gradients[i] * clip
        v[i] = v[i] * keep_v + (g * g) * add_v
        m[i] = m[i] * keep_m + g * add_m
        denominator = np.sqrt(v[i]) * to_root + epsilon
        parameters[i] = parameters[i] * keep - ((m[i] * to_mean) / denominator) * rate


update: Callable[..., None] = compiled(_signatures)(_update)
