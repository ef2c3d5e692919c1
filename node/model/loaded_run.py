"""A run as a node has loaded it: what stays the same whatever the plan."""

from __future__ import annotations

from dataclasses import dataclass

from dtfm.node.data.allowed import Allowed
from dtfm.node.data.dataset import Data
from dtfm.node.model.model import Model
from dtfm.node.network.dialling import Dialler
from dtfm.protos.plan_pb2 import Run


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """``dialler`` opens channels to peers. ``allowed``: the names that the run may use on this machine."""

    run: Run
    model: Model
    data: Data
    dialler: Dialler
    allowed: Allowed
