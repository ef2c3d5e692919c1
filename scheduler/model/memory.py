"""What a stage takes of a device's memory."""

from __future__ import annotations

KEPT_PER_OUTPUT_BYTE = 16.0
"""Bytes that the forward pass of a layer keeps for its backward, per byte of its output.

A decoder layer without its attention scores keeps 34 bytes per hidden value of 2 bytes (Korthikanti et al. 2022, section
4.1, scores recomputed as fused attention does), dropout masks aside 32: 16 times its output.
"""


def in_flight(stage: int, stages: int) -> int:
    """How many micro-batches a node of this stage holds between forward and backward, as ``node`` bounds them.

    One per stage that follows and as many again, so that links and devices stay busy; the last stage turns round at once.
    """
    return 1 if stage == stages - 1 else 2 * (stages - stage)
