"""What a node trains with, whatever the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from dtfm.node.state.snapshots import Snapshots
from dtfm.node.state.state_store import StateStore
from dtfm.node.training.preparing.preparation_progress import PreparationProgress
from dtfm.node.transport.kept import Kept
from dtfm.node.transport.sender import Sender
from dtfm.protos.control_pb2 import Device


@dataclass(frozen=True, slots=True)
class Equipment:
    """A node's means of training."""

    node: str
    device: torch.device
    hardware: Device
    """The result of `measure_device`."""
    tokens: Path
    """The folder where this machine's nodes share the tokens that they read."""
    frozen: Path
    """The folder where they share frozen weights."""
    sender: Sender
    store: StateStore
    snapshots: Snapshots
    kept: Kept = field(default_factory=Kept)
    progress: PreparationProgress = field(default_factory=PreparationProgress)
