"""Diallers of a run's members, for tests and benchmarks."""

from __future__ import annotations

from dtfm.node.network.dialling import Dialler
from dtfm.protos.control_pb2 import Peer
from tests.protos.members import member


def dialler(node: str) -> Dialler:
    """Opens channels as ``node``."""
    return Dialler(member(node))


def peer(node: str, *candidates: str) -> Peer:
    return Peer(node=node, candidates=candidates)
