"""The device memory that a stage needs."""

from __future__ import annotations

KEPT_PER_OUTPUT_BYTE = 16.0
"""Bytes that a layer's forward pass keeps for its backward pass, per byte of its output.

Without its attention scores, a decoder layer keeps 34 bytes per hidden value of 2 bytes (Korthikanti et al. 2022,
section 4.1; fused attention recomputes the scores). Without dropout masks these are 32 bytes: 16 times the output.
"""


def in_flight(stage: int, stages: int) -> int:
    """The largest number of micro-batches that a node of this stage holds between forward and backward unless the
    plan says otherwise.

    Two for each stage from this one on keep links and devices busy. The last stage turns around at once and holds one.
    """
    return 1 if stage == stages - 1 else 2 * (stages - stage)
