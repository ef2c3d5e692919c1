"""How this node reaches its peers and is reached by them, as the coordinator says: dialled, or over lent connections."""

from __future__ import annotations

import logging
from weakref import WeakSet

import grpc.aio

from dtfm.node.network.addresses import interfaces, near
from dtfm.node.network.dialling import Dialler
from dtfm.node.transport.doors import Doors
from dtfm.node.transport.lent_connections import Holder, Lender, NotLent, borrow
from dtfm.node.transport.pipes import Pipe
from dtfm.protos.connection import DEFAULT_LEASE
from dtfm.protos.control_pb2 import Peer, Ways as WaysMessage
from dtfm.protos.identity.credentials import Identity, nobody

log = logging.getLogger(__name__)


class Ways:
    """``start`` it once the node listens; tell it who the node is (``become``), and what the coordinator says (``follow``)."""

    def __init__(self, node: str, holder: Holder, *, loopback: bool) -> None:
        """``loopback``: whether peers may be on this machine. ``dialler`` opens channels to them."""
        self._node = node
        self._holder = holder
        self._doors = Doors(self._reach)
        self._lender = Lender(node, self._dial)
        self._relays: dict[str, Peer | None] = {}  # of nodes that are not dialled; None: they lend to this one
        self._holders: dict[str, Peer] = {}
        self._used: dict[str, WeakSet[Pipe]] = {}  # by node, the connections to it
        self._lease = DEFAULT_LEASE
        self.dialler = Dialler(nobody(), self._doors.to, self._relays.keys(), loopback)

    def start(self, listening: str) -> None:
        """``listening``: HOST:PORT of this node, to be reached from this machine."""
        self._lender.listens_at(listening)

    async def stop(self) -> None:
        await self._lender.close()
        await self._doors.stop()

    def become(self, identity: Identity, lease: float) -> None:
        """Opens channels to peers as this one from now on."""
        self._lease = lease
        self.dialler.identity = identity
        self.dialler.near = near(interfaces())  # this machine may have moved

    def follow(self, message: WaysMessage) -> None:
        """What the coordinator says about who reaches whom."""
        relays = {way.node: way.relay if way.HasField("relay") else None for way in message.ways}
        for node, relay in relays.items():
            if node not in self._relays or _name(self._relays[node]) != _name(relay):
                log.info("reaches %s by %s", node, f"relay {relay.node}" if relay else "dial-back")
                # A relay may have gone without a word: nobody waits for bytes sent over it.
                for pipe in self._used.pop(node, ()):
                    pipe.close()
        # Diallers look into this very dictionary, from other threads: a node that stays in it is never missing.
        self._relays.update(relays)
        for node in self._relays.keys() - relays.keys():
            del self._relays[node]
        self._holders = {peer.node: peer for peer in message.holders}
        self._lender.lend_to(self._holders)

    async def _reach(self, node: str) -> Pipe:
        """Raises NotLent."""
        if node not in self._relays:
            raise NotLent("the coordinator has named no way to it but dialling")
        if (relay := self._relays[node]) is None:
            pipe = await self._holder.take(node, self._lease / 2)
        else:
            pipe = borrow(self._open(relay), self._node, node)
        self._used.setdefault(node, WeakSet()).add(pipe)
        return pipe

    def _dial(self, holder: str) -> grpc.aio.Channel:
        return self._open(self._holders[holder])

    def _open(self, peer: Peer) -> grpc.aio.Channel:
        return self.dialler.open(peer.node, self.dialler.target(peer), self._lease, apart=True)


def _name(relay: Peer | None) -> str:
    return relay.node if relay is not None else ""
