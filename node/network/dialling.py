"""How this node opens channels to its peers: by their candidates, or over lent connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import grpc.aio

from dtfm.protos.candidates import Network, seen_at, target_of, way_to
from dtfm.protos.connection import DEFAULT_LEASE, open_channel
from dtfm.protos.control_pb2 import Peer
from dtfm.protos.identity.credentials import CERTIFIED_SUFFIX, Identity, certified_name, to_peer
from dtfm.protos.token_bucket import TokenBucket

MOST_AT_ONCE, MOST_PER_SECOND = 2048, 64.0
"""Candidates that this process dials. A run of hundreds of nodes needs some thousand now and then. An attack by a false list of
candidates needs many all the time."""


class Lost(ConnectionError):
    """``peer`` could not be reached, broke off, or refused what it was sent."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer


@dataclass(slots=True, eq=False)
class Dialler:
    """Opens channels to peers."""

    identity: Identity
    """Replaced when its certificate is renewed."""
    door: Callable[[str], str] = lambda node: f"{certified_name(node)}:443"
    """The address that gRPC dials for a node that is reached over a lent connection (node/transport/doors.py)."""
    indirect: Collection[str] = ()
    """The nodes that are reached over lent connections."""
    loopback: bool = True
    """Whether peers may be on this machine."""
    near: Collection[Network] = ()
    """The private networks that this machine is in."""
    budget: TokenBucket = field(default_factory=lambda: TokenBucket(MOST_PER_SECOND, MOST_AT_ONCE))

    def target(self, peer: Peer) -> str:
        """The target for ``open``. It stays the same while the peer is reached in the same way."""
        direct = target_of(peer.candidates, loopback=self.loopback, near=self.near)
        if direct and peer.node not in self.indirect:
            return direct
        return f"{certified_name(peer.node)}:443"

    def open(self, node: str, target: str, lease: float = DEFAULT_LEASE, apart: bool = False) -> grpc.aio.Channel:
        """A channel to ``node``; see `connection.open_channel`. If this process dials too much, the channel leads to the door,
        which has only lent connections."""
        if target.endswith(f"{CERTIFIED_SUFFIX}:443") or not self.budget.take(time.monotonic(), 1 + target.count(",")):
            target = self.door(node)
        return open_channel(target, to_peer(self.identity, node), lease, apart)

    def way(self, peer: Peer, seen: str) -> str:
        """The name of the direct way to ``peer``; empty if the way is not direct. ``seen``: the address that the peer saw this
        node come from, as gRPC names a call's peer."""
        address = seen_at(seen)
        return "" if peer.node in self.indirect or address is None else way_to(address, peer.candidates)
