"""A run as a node has loaded it: what stays the same whatever the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtfm.node.data.dataset import Data
from dtfm.node.model.model import Model
from dtfm.node.network.dialling import Dialler
from dtfm.protos.plan_pb2 import Run


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """``dialler`` opens channels to peers. ``allowed``: what the run may name of this machine's files (see read_allowed)."""

    run: Run
    model: Model
    data: Data
    dialler: Dialler
    allowed: Sequence[str]
