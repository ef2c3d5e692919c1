"""One end of the state benchmark. ``donor ADDRESS NUMBER`` gives buckets until its input ends. ``fetch`` reads lines of donors'
addresses (of donor 0, 1, ...), fetches all buckets from these, and prints the seconds that this took."""

from __future__ import annotations

import asyncio
import sys
import time

import torch

from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state.recovery import fetch_states
from dtfm.node.state.state_store import HeldState, StateStore
from dtfm.node.transport.peer_server import PeerServer
from dtfm.protos.control_pb2 import Peer
from tests.node.dialling import dialler
from tests.protos.members import member

STEP = 7
BUCKETS = 32
ELEMENTS = 87_382
"""The elements of each bucket: 1 MiB of state in fp32."""
SPECS = [BucketSpec(index, (index,), (("weight", (ELEMENTS,)),)) for index in range(BUCKETS)]
STATE_BYTES = BUCKETS * ELEMENTS * 3 * 4


def buckets() -> dict[int, Bucket]:
    return {spec.index: Bucket(spec, torch.device("cpu"), torch.float32) for spec in SPECS}


async def donor(address: str, number: str) -> None:
    async def at_once(_: float) -> None:
        pass

    store = StateStore()
    held = buckets()
    for index, bucket in held.items():
        for tensor in bucket.state:
            tensor.fill_(index + 1)
    store.replace(HeldState(STEP, held))
    server = PeerServer(store, at_once)
    server.become(member(f"donor {number}"))
    print(await server.start(f"{address}:0"), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


async def fetch(donors: list[Peer]) -> None:
    mine = buckets()
    began = time.perf_counter()
    await fetch_states([(bucket, donors) for bucket in mine.values()], STEP, 1, dialler("joiner"), 30)
    print(time.perf_counter() - began, flush=True)
    assert all((bucket.parameters == index + 1).all() for index, bucket in mine.items())


def main() -> None:
    match sys.argv[1:]:
        case ["donor", address, number]:
            asyncio.run(donor(address, number))
        case ["fetch"]:
            for line in sys.stdin:
                peers = [Peer(node=f"donor {i}", candidates=[address]) for i, address in enumerate(line.split())]
                asyncio.run(fetch(peers))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
