"""Nodes that keep backups, each with a disk of its own, and what is in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state.snapshot_files import file_name
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot import Keeper
from dtfm.node.state.state_store import Holding
from dtfm.node.transport.peer_server import PeerServer
from dtfm.protos.control_pb2 import Kept, NodeMessage, Part, Peer
from dtfm.protos.frame import STATE_CHUNK_BYTES
from dtfm.protos.plan_pb2 import Run
from tests.protos.members import member

STEP = 7
RUN = Run(id="run", lease_seconds=2)
SHORT = Run(id=RUN.id, lease_seconds=1)
SPECS = (BucketSpec(0, (0,), (("first", (600, 500)),)), BucketSpec(1, (1,), (("second", (3, 7)),)))


class Node:
    """A keeper with a disk of its own, and a server that lets peers at it. ``reports`` is what it says."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.disk = Disk(root / name, name)
        self.reports: asyncio.Queue[Kept] = asyncio.Queue()
        self.keeper = self.process()
        self.given = 0
        self.breaks_off = False
        self.server = PeerServer(Holding(), self._gave, self.disk)
        self.server.become(member(name))
        self.address = ""

    def process(self) -> Keeper:
        """A keeper of a new process on the same disk."""
        loop = asyncio.get_running_loop()

        def report(message: NodeMessage) -> None:
            loop.call_soon_threadsafe(self.reports.put_nowait, message.kept)

        keeper = Keeper(self.disk, report)
        self.earlier = {
            kept.step: [p.bucket for p in kept.parts] for kept in keeper.open(RUN, SPECS, member(self.name))
        }
        return keeper

    @property
    def peer(self) -> Peer:
        return Peer(node=self.name, address=self.address)

    @property
    def contents(self) -> dict[int, list[int]]:
        return {step: list(files) for step, files in self.disk.contents.items()}

    async def write(self, step: int = STEP, seed: int = 0) -> list[Part]:
        """As after a commit; who has the parts is filled in."""
        self.keeper.write(step, list(buckets(seed).values()))
        kept = await self.reports.get()
        assert (kept.step, kept.problem) == (step, "")
        for part in kept.parts:
            part.nodes.append(self.name)
        return list(kept.parts)

    def damage(self, bucket: int, at: int = -1) -> None:
        (file,) = self.disk._root.glob(f"*/step-*/{file_name(bucket)}")
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)

    async def _gave(self, _: float) -> None:
        self.given += 1
        if self.breaks_off:
            raise ConnectionError("after the first frame")


Three = tuple[Node, Node, Node]


@asynccontextmanager
async def three_nodes(root: Path) -> AsyncIterator[Three]:
    """a, b, and this one: each can reach the others."""
    a, b, c = (Node(name, root) for name in ("a", "b", "me"))
    for node in (a, b, c):
        node.address = f"127.0.0.1:{await node.server.start('127.0.0.1:0')}"
    try:
        yield a, b, c
    finally:
        for node in (a, b, c):
            await node.server.stop()
            node.keeper.close()


def buckets(seed: int = 0) -> Mapping[int, Bucket]:
    generator = torch.Generator().manual_seed(seed)
    made = {spec.index: Bucket(spec, torch.device("cpu"), torch.float32) for spec in SPECS}
    for bucket in made.values():
        for tensor in bucket.state:
            tensor.normal_(generator=generator)
    return made


def empty() -> Mapping[int, Bucket]:
    return {spec.index: Bucket(spec, torch.device("cpu"), torch.float32) for spec in SPECS}


async def restore(node: Node, parts: list[Part], *donors: Node) -> Mapping[int, Bucket]:
    mine = empty()
    await node.keeper.restore(STEP, {p.bucket: (mine[p.bucket], p) for p in parts}, [donor.peer for donor in donors])
    return mine


def frames_of(part: Part) -> int:
    return -(-part.size_bytes // STATE_CHUNK_BYTES)


def same(mine: Mapping[int, Bucket], seed: int = 0) -> bool:
    return all(
        torch.equal(ours, theirs)
        for index, bucket in buckets(seed).items()
        for ours, theirs in zip(mine[index].state, bucket.state, strict=True)
    )
