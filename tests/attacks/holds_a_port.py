"""`python -m tests.attacks.holds_a_port [relay]`: node a's port for peers, in a process of its own; a may be a relay. Prints the
port, and ends with its input."""

from __future__ import annotations

import asyncio
import sys

from dtfm.node.state.state_store import StateStore
from dtfm.node.transport.lent_connections import Holder
from dtfm.node.transport.peer_server import PeerServer
from tests.protos.members import member


async def no_wait(seconds: float) -> None:
    pass


async def main() -> None:
    server = PeerServer(StateStore(), no_wait, holder=Holder(relay="relay" in sys.argv))
    port = await server.start("127.0.0.1:0")
    server.become(member("a"), lease=60.0)
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
