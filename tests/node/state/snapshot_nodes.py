"""Nodes that keep snapshots, each with a disk of its own, and the snapshots' content."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import torch

from dtfm.node.data.allowed import Allowed
from dtfm.node.data.dataset import Data
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.model import Model
from dtfm.node.state.disk import Disk
from dtfm.node.state.images import Images
from dtfm.node.state.snapshot_files import file_header, file_name
from dtfm.node.state.snapshots import Snapshots
from dtfm.node.state.state_store import StateStore
from dtfm.node.transport.peer_server import PeerServer
from dtfm.protos.control_pb2 import Moved, NodeMessage, Part, Peer
from dtfm.protos.frame import STATE_CHUNK_BYTES
from dtfm.protos.plan_pb2 import Run
from tests.node.dialling import dialler
from tests.protos.members import member

STEP = 7
RUN = Run(id="run", lease_seconds=2)
SHORT = Run(id=RUN.id, lease_seconds=1)
SPECS = (BucketSpec(0, (0,), (("first", (600, 500)),)), BucketSpec(1, (1,), (("second", (3, 7)),)))


class SpecsOnly:
    """A model with known buckets alone."""

    constants: Mapping[str, torch.Tensor] = {}

    def __init__(self, buckets: Sequence[BucketSpec]) -> None:
        self.buckets = tuple(buckets)

    def save_config(self, folder: Path, dtype: torch.dtype, special_ids: Mapping[str, int]) -> None:
        (folder / "config.json").write_text(f"{dtype}")


class NoData:
    tokenizer = None


def loaded(node: str, run: Run = RUN, specs: Sequence[BucketSpec] = SPECS) -> LoadedRun:
    return LoadedRun(run, cast(Model, SpecsOnly(specs)), cast(Data, NoData()), dialler(node), Allowed(["/"]))


class Node:
    """A node with a disk of its own, and a server that lets peers read it. ``reports`` are its messages about snapshots,
    ``uploaded`` those about checkpoints."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.folder = root / name
        self.disk = Disk(self.folder, name)
        self.reports: asyncio.Queue[Moved] = asyncio.Queue()
        self.uploaded: asyncio.Queue[Moved] = asyncio.Queue()
        self.snapshots = self.process()
        self.images = Images(lambda size: self.disk.scratch(size))
        self.given = 0
        self.pace = 0.0
        """Seconds that the server waits after each frame."""
        self.breaks_off = False
        self.stops: list[int] = []
        """After these numbers of frames it breaks off, one after the other."""
        self.server = PeerServer(StateStore(), self._gave, self.disk)
        self.server.become(member(name))
        self.address = ""

    def process(self) -> Snapshots:
        """The snapshots of a new process on the same disk."""
        loop = asyncio.get_running_loop()

        def report(message: NodeMessage) -> None:
            told = self.uploaded if message.moved.in_checkpoint else self.reports
            loop.call_soon_threadsafe(told.put_nowait, message.moved)

        snapshots = Snapshots(self.disk, report)
        on_disk = snapshots.open(loaded(self.name))
        self.earlier = {told.step: [p.bucket for p in told.parts] for told in on_disk}
        return snapshots

    @property
    def peer(self) -> Peer:
        return Peer(node=self.name, candidates=[self.address])

    @property
    def contents(self) -> dict[int, list[int]]:
        return {step: list(files) for step, files in self.disk.contents.items()}

    def begin_write(self, step: int = STEP, live: Mapping[int, Bucket] | None = None) -> None:
        """As after a commit."""
        self.snapshots.writer.write(step, list((live if live is not None else buckets()).values()), self.images)

    async def write(self, step: int = STEP, seed: int = 0) -> list[Part]:
        """As after a commit; the parts name this node as the coordinator has them do."""
        self.begin_write(step, buckets(seed))
        told = await self.reports.get()
        assert (told.step, told.problem) == (step, "")
        for part in told.parts:
            part.nodes.append(self.name)
        return list(told.parts)

    def damage(self, bucket: int, at: int = -1) -> None:
        (file,) = self.folder.glob(f"*/step-*/{file_name(bucket)}")
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)

    async def _gave(self, _: float) -> None:
        self.given += 1
        if self.breaks_off:
            raise ConnectionError("after the first frame")
        if self.stops:
            self.stops[0] -= 1
            if self.stops[0] < 0:
                self.stops.pop(0)
                raise ConnectionError("in the middle")
        if self.pace:
            await asyncio.sleep(self.pace)


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
            node.snapshots.close()


def buckets(seed: int = 0) -> Mapping[int, Bucket]:
    generator = torch.Generator().manual_seed(seed)
    made = empty()
    for bucket in made.values():
        for tensor in bucket.state:
            tensor.normal_(generator=generator)
    return made


def empty() -> Mapping[int, Bucket]:
    return {spec.index: Bucket(spec, torch.device("cpu"), torch.float32) for spec in SPECS}


async def restore(node: Node, parts: list[Part], *donors: Node) -> Mapping[int, Bucket]:
    mine = empty()
    wanted = {p.bucket: (mine[p.bucket], p) for p in parts}
    await node.snapshots.restore(STEP, wanted, [donor.peer for donor in donors])
    return mine


def content_of(bucket: Bucket) -> bytes:
    """Its file's."""
    return file_header(bucket.spec, bucket.parameters.dtype) + bytes(bucket.read())


def put(disk: Disk, step: int, bucket: int, content: bytes) -> None:
    with disk.new_file(step, bucket, len(content)) as file:
        file.write(content)
        file.finish()


def get(disk: Disk, step: int, bucket: int) -> bytes:
    return b"".join(disk.read(step, bucket)[1])


def frames_of(part: Part) -> int:
    return -(-part.size_bytes // STATE_CHUNK_BYTES)


def same(mine: Mapping[int, Bucket], seed: int = 0) -> bool:
    return all(
        torch.equal(ours, theirs)
        for index, bucket in buckets(seed).items()
        for ours, theirs in zip(mine[index].state, bucket.state, strict=True)
    )
