"""The memory that a stage needs, and how a node may use less of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Checkpointing(enum.StrEnum):
    """What a node keeps of a micro-batch between its forward and its backward pass.

    Either everything for the backward pass, or each layer's input. From the input the backward pass computes the layer again
    (Chen et al. 2016, arXiv 1604.06174).
    """

    NONE = "none"
    LAYER = "layer"


class OptimizerState(enum.StrEnum):
    """Where the weights in full precision and AdamW's moments are kept: on the device, or in the host's memory, where AdamW then
    runs (ZeRO-Offload, arXiv 2101.06840)."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Keeping:
    """How one node keeps what it needs."""

    checkpointing: Checkpointing = Checkpointing.NONE
    optimizer_state: OptimizerState = OptimizerState.DEVICE


LADDER = tuple(Keeping(checkpointing, where) for where in OptimizerState for checkpointing in Checkpointing)
"""The ways to keep what a node needs, in the order of trying. A node takes the first way that fits its memory.

The cheapest come first. Computing each layer again is a third more work. Keeping state in the host's memory moves gradients and
weights over its bus, and has its processor compute AdamW, once per step. The scheduler's times leave out AdamW on the
processor, whose speed is not known; and the host's memory may serve several devices. So checkpointing is tried before keeping
state there.
"""

BUS_BYTES_PER_SECOND = 12e9
"""The assumed speed of copies between a device and pinned memory of its host. It is three quarters of 16 lanes of PCI Express
3.0 (8 GT/s each, 128b/130b), the least that a rented GPU usually has."""

DISK_BYTES_PER_SECOND = 5e8
"""The assumed writing speed of a node's disk: a disk on SATA is as fast, a disk on PCI Express several times faster."""

KEPT_PER_OUTPUT_BYTE = 16.0
"""Bytes that a layer's forward pass keeps for its backward pass, per byte of its output.

Without its attention scores, a decoder layer keeps 34 bytes per hidden value of 2 bytes (Korthikanti et al. 2022,
section 4.1; fused attention recomputes the scores). Without dropout masks these are 32 bytes: 16 times the output.
"""


def in_flight(stage: int, stages: int) -> int:
    """The largest number of micro-batches that a node of this stage holds between forward and backward, unless the plan says
    otherwise.

    Two for each stage from this one on keep links and devices busy. The last stage starts each backward pass right after the
    forward pass, and holds one.
    """
    return 1 if stage == stages - 1 else 2 * (stages - stage)
