"""A run as a node has loaded it: what stays the same whatever the plan."""

from __future__ import annotations

from dataclasses import dataclass

from dtfm.node.data.dataset import Data
from dtfm.node.model.model import Model
from dtfm.protos.credentials import Identity
from dtfm.protos.plan_pb2 import Run


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """``identity`` is this node's certificate and key for the run."""

    run: Run
    model: Model
    data: Data
    identity: Identity
