"""A node's part in backups: what is on its disk, what it gives to peers, what it takes from them, and what it makes of damage."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path

import grpc.aio
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dtfm.node import backup, disk, state_files
from dtfm.node.backup import BackupError, Keeper
from dtfm.node.bucket import Bucket, BucketSpec
from dtfm.node.checkpoint import file_name, to_file
from dtfm.node.disk import ABANDONED_SECONDS, Disk
from dtfm.node.failure import plan_failed
from dtfm.node.holding import Holding, Piece
from dtfm.node.peer_server import PeerServer
from dtfm.protos.connection import open_channel
from dtfm.protos.control_pb2 import Keep, Kept, NodeMessage, Part, Peer
from dtfm.protos.credentials import to_peer
from dtfm.protos.frame import STATE_CHUNK_BYTES
from dtfm.protos.peer_pb2 import StateRequest
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.streams import state_call
from tests.cluster.relay import Relay
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


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Node, Node, Node]]:
    a, b, c = (Node(name, tmp_path) for name in ("a", "b", "me"))
    for node in (a, b, c):
        node.address = f"127.0.0.1:{await node.server.start('127.0.0.1:0')}"
    yield a, b, c
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


async def test_what_is_written_is_as_it_was_at_the_commit_and_named_by_its_digest(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, _ = nodes
    live = buckets()
    contents = {index: to_file(bucket) for index, bucket in live.items()}
    a.keeper.write(STEP, list(live.values()))
    a.keeper.state_changes()
    for bucket in live.values():
        bucket.parameters.fill_(9)  # the next step
    kept = await a.reports.get()
    assert {p.bucket: (p.size_bytes, p.digest) for p in kept.parts} == {
        index: (len(content), blake3(content).digest()) for index, content in contents.items()
    }
    assert same(await restore(a, list(kept.parts)))
    assert a.given == 0


async def test_only_the_whole_one_and_the_one_under_way_stay_on_disk(nodes: tuple[Node, Node, Node]) -> None:
    a, _, _ = nodes
    await a.write(1)
    await a.write(2)
    assert a.contents == {2: [0, 1]}  # the first was never whole
    await a.keeper.keep(Keep(whole=2))
    await a.write(3)
    await a.write(4)
    assert a.contents == {2: [0, 1], 4: [0, 1]}
    await a.keeper.keep(Keep(whole=4))
    assert a.contents == {4: [0, 1]}


async def test_a_new_process_tells_what_is_on_disk_and_a_finished_run_leaves_nothing(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, _ = nodes
    parts = await a.write()
    a.keeper.close()
    a.keeper = a.process()
    assert a.earlier == {STEP: [0, 1]}
    assert same(await restore(a, parts))
    a.keeper.remove()
    a.keeper.close()
    assert list(a.disk._root.iterdir()) == []


async def test_of_what_cannot_be_removed_only_the_newest_is_told(nodes: tuple[Node, Node, Node]) -> None:
    a, _, _ = nodes
    for step in range(1, 10):
        a.disk.write(step, 0, b"state")
    a.disk.write(9, 8, b"of no such bucket")
    a.keeper.close()
    a.keeper = a.process()
    assert a.earlier == {6: [0], 7: [0], 8: [0], 9: [0]}


async def test_another_nodes_part_is_fetched_onto_disk_once(nodes: tuple[Node, Node, Node]) -> None:
    a, _, me = nodes
    parts = await a.write()
    wanted = Keep(begun=STEP, missing=parts, peers=[a.peer])
    for _ in range(2):
        await me.keeper.keep(wanted)
        kept = await me.reports.get()
        assert ({part.bucket for part in kept.parts}, kept.problem) == ({0, 1}, "")
    assert a.given == sum(map(frames_of, parts))  # the second time nothing is sent
    assert same(await restore(me, parts))


async def test_what_is_lacking_comes_from_others_disks_and_what_is_here_does_not(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, me = nodes
    parts = await a.write()
    await me.keeper.keep(Keep(begun=STEP, missing=parts[1:], peers=[a.peer]))
    await me.keeper.keep(Keep(whole=STEP))
    given = a.given
    assert same(await restore(me, parts, a))
    assert a.given - given == frames_of(parts[0])
    assert me.contents == {STEP: [0, 1]}


async def test_a_damaged_file_is_not_used_but_fetched_again(nodes: tuple[Node, Node, Node]) -> None:
    a, _, me = nodes
    parts = await a.write()
    await me.write()
    me.damage(1)
    assert same(await restore(me, parts, a))
    assert a.given == 1


async def test_a_donor_whose_file_is_damaged_is_passed_over(nodes: tuple[Node, Node, Node]) -> None:
    a, b, me = nodes
    parts = await a.write()
    await b.write()
    for part in parts:
        part.nodes.append("b")
    a.damage(0)
    assert same(await restore(me, parts, a, b))


async def test_of_two_who_gave_a_damaged_file_together_the_one_who_broke_off_is_passed_over(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, b, me = nodes
    parts = await a.write()
    await b.write()
    for part in parts:
        part.nodes.append("b")
    a.breaks_off = True
    a.damage(0, at=60_000)  # in what comes before that
    assert same(await restore(me, parts, a, b))
    assert a.given


async def test_where_all_are_damaged_that_is_said(nodes: tuple[Node, Node, Node]) -> None:
    a, _, me = nodes
    parts = await a.write()
    a.damage(0)
    with pytest.raises(
        BackupError, match=f"step {STEP} cannot be had .*bucket 0 .*a: its file is not what was written"
    ) as caught:
        await restore(me, parts, a)
    assert plan_failed(1, caught.value).backup
    assert me.contents.get(STEP, []) in ([], [1])


@pytest.mark.parametrize("here", [True, False])
async def test_what_is_no_state_at_all_is_no_backup(nodes: tuple[Node, Node, Node], here: bool) -> None:
    a, _, me = nodes
    garbage = b"\xff" * 100
    (me if here else a).disk.write(STEP, 1, garbage)
    part = Part(bucket=1, size_bytes=len(garbage), digest=blake3(garbage).digest(), nodes=["a"])
    with pytest.raises(BackupError, match=f"step {STEP} cannot be had"):
        await restore(me, [part], a)


async def test_that_nobody_is_there_who_has_a_part_is_no_damage(nodes: tuple[Node, Node, Node]) -> None:
    a, _, me = nodes
    parts = await a.write()
    with pytest.raises(ConnectionError, match="nobody who is known has bucket 0") as caught:
        await restore(me, parts)
    assert not plan_failed(1, caught.value).backup


async def test_that_who_had_a_part_is_out_of_reach_is_no_damage(nodes: tuple[Node, Node, Node]) -> None:
    a, _, me = nodes
    parts = await a.write()
    me.keeper.open(SHORT, SPECS, member("me"))
    a.address = "127.0.0.1:1"
    with pytest.raises(ConnectionError, match=f"step {STEP} cannot be had: .* a at 127.0.0.1:1: UNAVAILABLE"):
        await restore(me, parts, a)


async def test_that_who_had_a_part_has_lost_it_is_damage_and_known_at_once(nodes: tuple[Node, Node, Node]) -> None:
    a, _, me = nodes
    parts = await a.write()
    a.disk.remove()
    began = time.monotonic()
    with pytest.raises(BackupError, match="NOT_HELD: there is no backup of bucket"):
        await restore(me, parts, a)
    assert time.monotonic() - began < RUN.lease_seconds


async def test_a_part_that_the_model_cannot_have_is_not_asked_for(nodes: tuple[Node, Node, Node]) -> None:
    a, _, me = nodes
    parts = await a.write()
    parts[1].size_bytes += 2 << 20
    with pytest.raises(BackupError, match="the model has no bucket 1 whose file has"):
        await restore(me, parts, a)
    await me.keeper.keep(Keep(begun=STEP, missing=[Part(bucket=9, digest=bytes(32), nodes=["a"])], peers=[a.peer]))
    assert "the model has no bucket 9" in (await me.reports.get()).problem
    assert a.given == 0


async def test_over_a_link_that_takes_two_leases_for_them_two_parts_arrive_at_once(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, me = nodes
    specs = [BucketSpec(index, (index,), ((f"{index}", (12_000,)),)) for index in range(2)]
    for node in (a, me):
        node.keeper.open(SHORT, specs, member(node.name))
    a.keeper.write(STEP, [Bucket(spec, torch.device("cpu"), torch.float32) for spec in specs])
    parts = (await a.reports.get()).parts
    for part in parts:
        part.nodes.append("a")
    with Relay(int(a.address.rpartition(":")[2]), sum(part.size_bytes for part in parts) / 2) as relay:
        a.address = f"127.0.0.1:{relay.port}"
        await me.keeper.keep(Keep(begun=STEP, missing=parts, peers=[a.peer]))
        kept = await me.reports.get()
    assert ({part.bucket for part in kept.parts}, kept.problem) == ({0, 1}, "")


async def test_a_donor_is_not_asked_anew_for_waiting_while_others_have_the_link(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, me = nodes
    parts = await a.write()
    await b.write()
    parts[1].nodes[:] = ["b"]
    me.keeper.open(SHORT, SPECS, member("me"))
    asked: list[int] = []
    donate = b.disk.donate

    def donated(request: StateRequest) -> Piece:
        asked.append(request.bucket)
        time.sleep(1.5 * SHORT.lease_seconds)
        return donate(request)

    async def slowly(_: float) -> None:
        await asyncio.sleep(1.6 * SHORT.lease_seconds / frames_of(parts[0]))

    monkeypatch.setattr(b.disk, "donate", donated)
    monkeypatch.setattr(a.server, "_give_way", slowly)
    assert same(await restore(me, parts, a, b))
    assert asked == [1]


async def test_a_newer_wish_takes_the_place_of_the_one_before(nodes: tuple[Node, Node, Node]) -> None:
    a, _, me = nodes
    parts = await a.write()
    unreachable = Peer(node="a", address="127.0.0.1:1")
    first = asyncio.create_task(me.keeper.keep(Keep(begun=STEP, missing=parts, peers=[unreachable])))
    await asyncio.sleep(0)
    await me.keeper.keep(Keep(begun=STEP, missing=parts, peers=[a.peer]))
    assert {part.bucket for part in (await me.reports.get()).parts} == {0, 1}
    with pytest.raises(asyncio.CancelledError):
        await first
    assert me.reports.empty()


async def test_a_disk_without_room_is_not_filled(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, me = nodes
    parts = await a.write()
    monkeypatch.setattr(disk, "ROOM_SHARE", 1e-12)
    me.keeper.write(STEP, list(buckets().values()))
    assert "bytes free" in (await me.reports.get()).problem
    await me.keeper.keep(Keep(begun=STEP, missing=parts, peers=[a.peer]))
    kept = await me.reports.get()
    assert ("bytes free" in kept.problem, list(kept.parts)) == (True, [])
    assert same(await restore(me, parts, a))  # it can use what it cannot keep


async def test_without_memory_for_copies_nothing_is_written(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = nodes
    monkeypatch.setattr(backup, "free_memory", lambda device: 1 << 20)
    a.keeper.write(STEP, list(buckets().values()))
    assert "too much for 1048576 bytes of free memory" in (await a.reports.get()).problem
    assert a.contents == {}


@pytest.mark.parametrize("meanwhile", [False, True], ids=["as it is", "state changes"])
async def test_state_that_cannot_be_copied_costs_the_backup_and_no_step(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    a, _, _ = nodes
    busy = threading.Event()
    if meanwhile:
        a.keeper._thread.submit(busy.wait)

    def no_memory(_: Bucket) -> bytes:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(state_files, "to_file", no_memory)
        a.keeper.write(STEP, list(buckets().values()))
        if meanwhile:
            a.keeper.state_changes()
            busy.set()
        assert "can't allocate memory" in (await a.reports.get()).problem
    await a.write(STEP + 1)


async def test_without_a_thread_to_write_it_a_backup_fails_and_no_step(nodes: tuple[Node, Node, Node]) -> None:
    a, _, _ = nodes
    a.keeper.close()
    a.keeper.write(STEP, list(buckets().values()))
    assert "cannot schedule" in (await a.reports.get()).problem


async def test_without_memory_for_what_others_have_nothing_is_fetched(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, me = nodes
    parts = await a.write()
    monkeypatch.setattr(backup, "free_memory", lambda device: parts[0].size_bytes)
    await me.keeper.keep(Keep(begun=STEP, missing=parts, peers=[a.peer]))
    assert f"too much for {parts[0].size_bytes} bytes of free memory" in (await me.reports.get()).problem
    with pytest.raises(OSError, match="too much for") as caught:
        await restore(me, parts, a)
    assert not plan_failed(1, caught.value).backup
    assert a.given == 0


async def test_what_cannot_be_kept_is_said_whatever_it_is(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, me = nodes
    parts = await a.write()

    def keep(_: Collection[int]) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(me.disk, "keep", keep)
    await me.keeper.keep(Keep(begun=STEP, missing=parts, peers=[a.peer]))
    assert (await me.reports.get()).problem == "PermissionError: read-only"


@given(content=st.binary(max_size=60), passes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4))
def test_a_file_whose_pieces_come_again_from_an_earlier_one_on_is_as_it_was(
    content: bytes, passes: list[tuple[int, int]]
) -> None:
    came: list[bytes] = []
    part = Part(bucket=0, size_bytes=len(content), digest=blake3(content).digest())
    incoming, have = backup._Incoming(part, lambda _, whole: came.append(whole)), 0
    for start, stop in [*passes, (60, 60)]:
        start, stop = min(start, have), min(stop, len(content))
        for at in range(start, stop, 7):
            incoming.take(memoryview(content)[at : min(at + 7, stop)], at)
        have = max(start, stop)
    assert asyncio.run(incoming.finish()) == ""
    assert came == [content]


async def test_a_file_is_in_memory_once_and_digested_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(8 << 20)
    part = Part(bucket=0, size_bytes=len(content), digest=blake3(content).digest())
    tracemalloc.start()
    try:
        incoming = backup._Incoming(part, lambda _, whole: None)
        for at in range(0, len(content), STATE_CHUNK_BYTES):
            incoming.take(memoryview(content)[at : at + STATE_CHUNK_BYTES], at)
        monkeypatch.setattr(backup, "blake3", None)
        assert await incoming.finish() == ""
        assert tracemalloc.get_traced_memory()[1] < 1.3 * len(content)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("step", "bucket"), [(STEP, 9), (STEP + 1, 0), (0, 0)])
async def test_who_asks_for_what_is_not_there_hears_so(nodes: tuple[Node, Node, Node], step: int, bucket: int) -> None:
    a, _, _ = nodes
    await a.write()
    request = StateRequest(step=step, bucket=bucket, backup=True)
    async with open_channel(a.address, to_peer(member("me"), "a")) as channel:
        with pytest.raises(
            grpc.aio.AioRpcError, match=f"NOT_HELD: there is no backup of bucket {bucket} as of step {step}"
        ):
            [frame async for frame in state_call(channel)(request.SerializeToString())]


async def test_a_transfer_goes_on_where_it_stopped(nodes: tuple[Node, Node, Node]) -> None:
    a, _, _ = nodes
    parts = await a.write()
    request = StateRequest(step=STEP, bucket=0, backup=True, offset=parts[0].size_bytes - 10)
    async with open_channel(a.address, to_peer(member("me"), "a")) as channel:
        (frame,) = [frame async for frame in state_call(channel)(request.SerializeToString())]
    assert frame.endswith(a.disk.read(STEP, 0)[-10:])


def test_before_a_run_is_read_nothing_is_there(tmp_path: Path) -> None:
    unopened = Disk(tmp_path, "a")
    assert unopened.contents == {}
    with pytest.raises(LookupError, match="NOT_HELD"):
        unopened.read(STEP, 0)


def test_names_of_nodes_and_runs_lead_nowhere_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for node, run in (("../..", "../../x"), ("a", ".."), ("a/b", "")):
        one = Disk(root, node)
        one.open(run)
        one.write(STEP, 0, b"state")
        assert one.read(STEP, 0) == b"state"
    assert len(list(root.iterdir())) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


def test_what_another_run_left_long_ago_is_removed(tmp_path: Path) -> None:
    old, recent, mine = Disk(tmp_path, "a"), Disk(tmp_path, "a"), Disk(tmp_path, "a")
    for one, run in ((old, "old"), (recent, "recent")):
        one.open(run)
        one.write(STEP, 0, b"state")
    long_ago = time.time() - ABANDONED_SECONDS - 60
    others = [tmp_path / "thesis", tmp_path / f"backup-{'0' * 32}" / "letters"]
    for other in others:
        other.mkdir(parents=True)
    for entry in tmp_path.iterdir():
        if entry != recent._folder:
            os.utime(entry, (long_ago, long_ago))
    mine.open("mine")
    assert all(other.exists() for other in others)
    assert (old.contents, recent.contents) == ({}, {STEP: {0: 5}})


def test_what_is_no_backup_is_left_alone_and_not_counted(tmp_path: Path) -> None:
    one = Disk(tmp_path, "a")
    one.open("run")
    one.write(STEP, 0, b"state")
    assert one._folder is not None
    (one._folder / "notes").mkdir()
    (one._folder / f"step-{STEP:08d}" / f"{file_name(1)}.part").write_bytes(b"half")
    assert one.contents == {STEP: {0: 5}}
    one.keep([])
    assert [entry.name for entry in one._folder.iterdir()] == ["notes"]
