"""One end of the links benchmark. ``peer ADDRESS NAME`` answers probes until its input ends; ``measure NAME=HOST:PORT ...``
measures the links to these peers and prints the report as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from dtfm.node.network.links import measure_links
from dtfm.node.state.state_store import StateStore
from dtfm.node.transport.peer_server import PeerServer
from dtfm.protos.control_pb2 import Peer
from tests.node.dialling import dialler
from tests.protos.members import member

LEASE = 20.0
JOINER = "joiner"


async def answer(address: str, name: str) -> None:
    async def at_once(_: float) -> None:
        pass

    server = PeerServer(StateStore(), at_once)
    server.become(member(name))
    print(await server.start(f"{address}:0"), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


async def measure(peers: list[Peer]) -> None:
    began = time.perf_counter()
    report = await measure_links(JOINER, peers, dialler(JOINER), LEASE)
    links = [[link.source, link.destination, link.latency_seconds, link.bandwidth] for link in report.links]
    together = {"up": report.up, "down": report.down}
    print(json.dumps({"links": links, "together": together, "seconds": time.perf_counter() - began}), flush=True)


def main() -> None:
    match sys.argv[1:]:
        case ["peer", address, name]:
            asyncio.run(answer(address, name))
        case ["measure", *peers]:
            named = [peer.split("=") for peer in peers]
            asyncio.run(measure([Peer(node=name, candidates=[address]) for name, address in named]))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
