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
"""Candidates that this process dials. A run of hundreds of nodes needs some thousand now and then; an attack by a false list of
candidates needs many all the time."""


class Lost(ConnectionError):
    """``peer`` could not be reached, broke off, or refused what it was sent."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer


@dataclass(slots=True, eq=False)
class Dialler:
    """Opens channels as ``identity``, which is replaced when its certificate is renewed. ``indirect`` are the nodes that are
    reached over lent connections, for which gRPC dials their ``door`` (node/transport/doors.py). ``loopback``: whether peers may
    be on this machine. ``near``: the private networks that this machine is in."""

    identity: Identity
    door: Callable[[str], str] = lambda node: f"{certified_name(node)}:443"
    indirect: Collection[str] = ()
    loopback: bool = True
    near: Collection[Network] = ()
    budget: TokenBucket = field(default_factory=lambda: TokenBucket(MOST_PER_SECOND, MOST_AT_ONCE))

    def target(self, peer: Peer) -> str:
        """Where ``open`` is to go. It stays the same while the peer is reached in the same way."""
        direct = target_of(peer.candidates, loopback=self.loopback, near=self.near)
        if direct and peer.node not in self.indirect:
            return direct
        return f"{certified_name(peer.node)}:443"

    def open(self, node: str, target: str, lease: float = DEFAULT_LEASE, apart: bool = False) -> grpc.aio.Channel:
        """A channel to ``node``; see `connection.open_channel`. If this process dials too much, it leads to the door, where only
        lent connections are found."""
        if target.endswith(f"{CERTIFIED_SUFFIX}:443") or not self.budget.take(time.monotonic(), 1 + target.count(",")):
            target = self.door(node)
        return open_channel(target, to_peer(self.identity, node), lease, apart)

    def way(self, peer: Peer, seen: str) -> str:
        """What the direct way to ``peer`` is called, as which it saw this node come (what gRPC calls a call's peer); empty if it
        is not direct."""
        address = seen_at(seen)
        return "" if peer.node in self.indirect or address is None else way_to(address, peer.candidates)
