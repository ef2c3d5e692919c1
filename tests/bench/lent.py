"""Streams over lent connections beside direct ones: ``python -m tests.bench.lent [--json]``.

One process sends 64 MiB tensors to another on loopback, with certificates on both sides. It sends over a direct connection,
over a connection that the receiver has lent to the sender, and over one that it has lent to a relay, a third process. A ratio
is the median of the ratios within each turn, a speed the median over turns. The first turn opens the connections and does not
count. All processes share this machine's cores: between machines, each has its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from subprocess import PIPE, Popen
from typing import Any

import grpc.aio

from dtfm.node.host.device import keep_freed_memory
from dtfm.node.state.state_store import StateStore
from dtfm.node.transport.doors import Doors
from dtfm.node.transport.lent_connections import Holder, Lender, borrow
from dtfm.node.transport.peer_server import PeerServer
from dtfm.node.transport.pipes import Pipe
from dtfm.protos.connection import DEFAULT_LEASE, open_channel
from dtfm.protos.identity.credentials import Identity, to_peer
from tests.bench.rows import Row, show
from tests.bench.stream_end import RECEIVER, TENSOR_BYTES, Receiver, Sender, identity_line
from tests.cluster.launch import ROOT
from tests.protos.members import member

SENDER, RELAY = "sender", "relay"
TURNS, TENSORS = 9, 4


async def hold(identity: Identity, relay: bool) -> tuple[PeerServer, int]:
    server = PeerServer(StateStore(), lambda seconds: asyncio.sleep(0), holder=Holder(relay))
    server.become(identity)
    return server, await server.start("127.0.0.1:0")


async def end(which: str) -> None:
    """The relay, or the receiver. Prints its port; the receiver then reads the ports of the processes that it lends to."""
    keep_freed_memory()
    identity = Identity(**{name: pem.encode() for name, pem in json.loads(sys.stdin.readline()).items()})
    if which == RELAY:
        _, port = await hold(identity, relay=True)
    else:
        port = (await Receiver(identity).start("127.0.0.1"))["ours, mTLS"]
    print(port, flush=True)
    if which == RECEIVER:
        holders = json.loads(sys.stdin.readline())

        def dial(holder: str) -> grpc.aio.Channel:
            return open_channel(f"127.0.0.1:{holders[holder]}", to_peer(identity, holder), DEFAULT_LEASE, apart=True)

        lender = Lender(RECEIVER, dial)
        lender.listens_at(f"127.0.0.1:{port}")
        lender.lend_to(holders)
    await asyncio.to_thread(sys.stdin.readline)


async def measure(ends: dict[str, tuple[Popen[str], int]]) -> list[Row]:
    identity = member(SENDER)
    server, port = await hold(identity, relay=False)
    receiver, at = ends[RECEIVER]
    assert receiver.stdin is not None
    receiver.stdin.write(json.dumps({SENDER: port, RELAY: ends[RELAY][1]}) + "\n")
    receiver.stdin.flush()
    relay = f"127.0.0.1:{ends[RELAY][1]}"

    async def lent(_: str) -> Pipe:
        return await server.holder.take(RECEIVER, DEFAULT_LEASE)

    async def relayed(_: str) -> Pipe:
        return borrow(open_channel(relay, to_peer(identity, RELAY), apart=True), SENDER, RECEIVER)

    doors = {"lent to the sender": Doors(lent), "lent to a relay": Doors(relayed)}
    way = to_peer(identity, RECEIVER)
    channels = {"direct": open_channel(f"127.0.0.1:{at}", way)}
    for which, door in doors.items():
        channels[which] = open_channel(door.to(RECEIVER), way, apart=True)
    speeds: dict[str, list[float]] = {which: [] for which in channels}
    sender = Sender(identity)
    for turn in range(TURNS + 1):
        for which, channel in channels.items():
            sender.use(which, channel)
            began = time.perf_counter()
            await sender.send("ours, mTLS", which, TENSORS)
            if turn:
                speeds[which].append(TENSORS * TENSOR_BYTES / (time.perf_counter() - began) / 1e6)
    rows = []
    for which, taken in speeds.items():
        ratio = statistics.median(ours / direct for ours, direct in zip(taken, speeds["direct"], strict=True))
        against = ("", None) if which == "direct" else ("direct", ratio)
        rows.append(Row(which, statistics.median(taken), "MB/s", *against))
    for channel in channels.values():
        await channel.close()
    for door in doors.values():
        await door.stop()
    await server.stop()
    return rows


def start(which: str) -> tuple[Popen[str], int]:
    command = [sys.executable, "-m", "tests.bench.lent", "--end", which]
    process: Popen[str] = Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(identity_line(member(which)))
    process.stdin.flush()
    return process, int(process.stdout.readline())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--end", choices=(RELAY, RECEIVER), help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    if arguments.end:
        asyncio.run(end(arguments.end))
        return 0
    ends = {which: start(which) for which in (RELAY, RECEIVER)}
    try:
        show("Streams of 64 MiB tensors over lent connections", asyncio.run(measure(ends)), arguments.json)
    finally:
        for process, _ in ends.values():
            process.kill()
            process.communicate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
