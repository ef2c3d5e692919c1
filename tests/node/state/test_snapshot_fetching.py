"""What nodes fetch from others' disks, to keep it or to go back to it, and what they do about damage."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio
import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings, strategies as st

from dtfm.node.data.shared.storage import NewFile
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state.snapshot_files import SnapshotDamaged
from dtfm.node.state.state_store import Donation
from dtfm.node.training.failure import plan_failed
from dtfm.protos.connection import open_channel
from dtfm.protos.control_pb2 import Keep, Move, Part, Peer
from dtfm.protos.identity.credentials import to_peer
from dtfm.protos.peer_pb2 import StateRequest
from dtfm.protos.streams import method
from tests.cluster.relay import Relay
from tests.node.state.snapshot_nodes import (
    RUN,
    SHORT,
    STEP,
    Three,
    frames_of,
    get,
    loaded,
    put,
    restore,
    same,
    three_nodes,
)
from tests.protos.members import member


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Three]:
    async with three_nodes(tmp_path) as nodes:
        yield nodes


async def test_another_nodes_part_is_fetched_onto_disk_once(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    wanted = Move(step=STEP, parts=parts, peers=[a.peer])
    for _ in range(2):
        await me.snapshots.fetch(wanted)
        told = await me.reports.get()
        assert ({part.bucket for part in told.parts}, told.problem) == ({0, 1}, "")
    assert a.given == sum(map(frames_of, parts))  # the second time nothing is sent
    assert same(await restore(me, parts))


async def test_what_is_on_its_way_is_not_called_off_by_a_word_about_what_to_keep(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the files of the same snapshot have arrived in a checkpoint."""
    a, _, me = nodes
    parts = await a.write()
    begun, free, fetch = asyncio.Event(), asyncio.Event(), me.snapshots._fetch

    async def held(*arguments: Any) -> None:
        if arguments[1]:
            begun.set()
            await free.wait()
        await fetch(*arguments)

    monkeypatch.setattr(me.snapshots, "_fetch", held)
    wanted = Move(step=STEP, parts=parts, peers=[a.peer])
    fetching = asyncio.create_task(me.snapshots.fetch(wanted))
    await begun.wait()
    await me.snapshots.keep(Keep(steps=[STEP]))
    free.set()
    await fetching
    told = await me.reports.get()
    assert ({part.bucket for part in told.parts}, told.problem) == ({0, 1}, "")


async def test_what_is_to_be_removed_first_has_made_room_when_a_fetch_asks_for_it(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the coordinator says both at once, and a disk may take a while to remove files."""
    a, _, me = nodes
    parts = await a.write()
    await me.write(STEP - 1)

    asked = threading.Event()

    def keep_slowly(steps: Collection[int]) -> None:
        assert asked.wait(10)
        keep(steps)

    def check_room(_: int) -> None:
        if STEP - 1 in me.contents:
            raise OSError("the old snapshot takes the room")

    keep = me.disk.keep
    monkeypatch.setattr(me.disk, "keep", keep_slowly)
    monkeypatch.setattr(me.disk, "check_room", check_room)
    keeping = asyncio.create_task(me.snapshots.keep(Keep(steps=[STEP])))
    fetching = asyncio.create_task(me.snapshots.fetch(Move(step=STEP, parts=parts, peers=[a.peer])))
    for _ in range(10):  # until both wait for the disk
        await asyncio.sleep(0)
    asked.set()
    await asyncio.gather(keeping, fetching)
    told = await me.reports.get()
    assert ({part.bucket for part in told.parts}, told.problem) == ({0, 1}, "")


async def test_missing_parts_come_from_others_disks_and_parts_on_this_disk_do_not(
    nodes: Three,
) -> None:
    a, _, me = nodes
    parts = await a.write()
    await me.snapshots.fetch(Move(step=STEP, parts=parts[1:], peers=[a.peer]))
    await me.snapshots.keep(Keep(steps=[STEP]))
    given = a.given
    assert same(await restore(me, parts, a))
    assert a.given - given == frames_of(parts[0])
    assert me.contents == {STEP: [1]}


async def test_a_damaged_file_is_not_used_but_fetched_again(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    await me.write()
    me.damage(1)
    assert same(await restore(me, parts, a))
    assert a.given == 1


async def test_a_donor_whose_file_is_damaged_is_passed_over(nodes: Three) -> None:
    a, b, me = nodes
    parts = await a.write()
    await b.write()
    for part in parts:
        part.nodes.append("b")
    a.damage(0)
    assert same(await restore(me, parts, a, b))
    await me.snapshots.fetch(Move(step=STEP, parts=parts, peers=[a.peer, b.peer]))
    assert len((await me.reports.get()).parts) == 2
    assert not [*me.folder.rglob("*.part")]  # of the bytes that came first


async def test_a_file_that_this_disk_cannot_read_comes_from_another(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, me = nodes
    parts = await a.write()
    await me.write()

    def broken(*_: int) -> tuple[int, Iterator[memoryview]]:
        def pieces() -> Iterator[memoryview]:
            yield memoryview(b"the beginning")
            raise OSError(errno.EIO, "Input/output error")

        return 1000, pieces()

    monkeypatch.setattr(me.disk, "read", broken)
    assert same(await restore(me, parts, a))


async def test_if_two_donors_gave_a_damaged_file_together_the_one_that_broke_off_is_passed_over(
    nodes: Three,
) -> None:
    a, b, me = nodes
    parts = await a.write()
    await b.write()
    for part in parts:
        part.nodes.append("b")
    a.breaks_off = True
    a.damage(0, at=60_000)  # in the bytes before that
    assert same(await restore(me, parts, a, b))
    assert a.given


async def test_a_part_that_is_damaged_everywhere_is_reported(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    a.damage(0)
    with pytest.raises(
        SnapshotDamaged, match=f"step {STEP} cannot be read: .*bucket 0 .*a: its file is damaged"
    ) as caught:
        await restore(me, parts, a)
    assert plan_failed(1, caught.value).snapshot_damaged
    assert me.contents == {}


@pytest.mark.parametrize("here", [True, False])
async def test_a_file_that_is_no_state_at_all_counts_as_damaged(nodes: Three, here: bool) -> None:
    a, _, me = nodes
    garbage = b"\xff" * 100
    put((me if here else a).disk, STEP, 1, garbage)
    part = Part(bucket=1, size_bytes=len(garbage), digest=blake3(garbage).digest(), nodes=["a"])
    with pytest.raises(SnapshotDamaged, match=f"step {STEP} cannot be read"):
        await restore(me, [part], a)


async def test_a_part_whose_nodes_are_gone_is_not_damaged(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    with pytest.raises(ConnectionError, match="no known node has bucket 0") as caught:
        await restore(me, parts)
    assert not plan_failed(1, caught.value).snapshot_damaged


async def test_a_part_whose_nodes_are_out_of_reach_is_not_damaged(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    me.snapshots.open(loaded("me", SHORT))
    a.address = "127.0.0.1:1"
    with pytest.raises(ConnectionError, match=f"step {STEP} is out of reach: .* a: UNAVAILABLE"):
        await restore(me, parts, a)


async def test_a_part_that_its_node_has_lost_counts_as_damaged_at_once(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    a.disk.remove()
    began = time.monotonic()
    with pytest.raises(SnapshotDamaged, match=r"NOT_HELD: bucket \d as of step 7 is in no snapshot"):
        await restore(me, parts, a)
    assert time.monotonic() - began < RUN.lease_seconds


async def test_a_part_that_the_model_cannot_have_is_not_asked_for(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    parts[1].size_bytes += 2 << 20
    with pytest.raises(SnapshotDamaged, match="the model has no bucket 1 whose file has"):
        await restore(me, parts, a)
    await me.snapshots.fetch(Move(step=STEP, parts=[Part(bucket=9, digest=bytes(32), nodes=["a"])], peers=[a.peer]))
    assert "the model has no bucket 9" in (await me.reports.get()).problem
    assert a.given == 0


async def test_two_parts_arrive_over_a_link_that_takes_two_leases_for_them(
    nodes: Three,
) -> None:
    a, _, me = nodes
    specs = [BucketSpec(index, (index,), ((f"{index}", (12_000,)),)) for index in range(2)]
    me.snapshots.open(loaded("me", SHORT, specs))
    live = [Bucket(spec, torch.device("cpu"), torch.float32) for spec in specs]
    a.snapshots.writer.write(STEP, live, a.images)
    parts = (await a.reports.get()).parts
    for part in parts:
        part.nodes.append("a")
    with Relay(int(a.address.rpartition(":")[2]), sum(part.size_bytes for part in parts) / 2) as relay:
        a.address = f"127.0.0.1:{relay.port}"
        await me.snapshots.fetch(Move(step=STEP, parts=parts, peers=[a.peer]))
        told = await me.reports.get()
    assert ({part.bucket for part in told.parts}, told.problem) == ({0, 1}, "")


async def test_a_donor_that_waits_while_others_use_the_link_is_not_asked_again(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, me = nodes
    parts = await a.write()
    await b.write()
    parts[1].nodes[:] = ["b"]
    me.snapshots.open(loaded("me", SHORT))
    asked: list[int] = []
    donate = b.disk.donate

    def donated(request: StateRequest) -> Donation:
        asked.append(request.bucket)
        time.sleep(1.5 * SHORT.lease_seconds)
        return donate(request)

    monkeypatch.setattr(b.disk, "donate", donated)
    a.pace = 1.6 * SHORT.lease_seconds / frames_of(parts[0])
    assert same(await restore(me, parts, a, b))
    assert asked == [1]


async def test_another_request_for_the_same_snapshot_goes_on_beside_the_one_before(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    me.snapshots.open(loaded("me", SHORT))
    unreachable = Peer(node="a", candidates=["127.0.0.1:1"])
    first = asyncio.create_task(me.snapshots.fetch(Move(step=STEP, parts=parts[:1], peers=[unreachable])))
    await asyncio.sleep(0)
    await me.snapshots.fetch(Move(step=STEP, parts=parts[1:], peers=[a.peer]))
    assert [part.bucket for part in (await me.reports.get()).parts] == [1]
    await first
    told = await me.reports.get()
    assert (list(told.parts), bool(told.problem)) == ([], True)


@pytest.mark.parametrize("newer", [True, False])
async def test_a_fetch_ends_without_a_word_when_another_snapshot_is_fetched_or_its_own_is_not_kept(
    nodes: Three, newer: bool
) -> None:
    a, _, me = nodes
    parts = await a.write()
    unreachable = Peer(node="a", candidates=["127.0.0.1:1"])
    first = asyncio.create_task(me.snapshots.fetch(Move(step=STEP, parts=parts, peers=[unreachable])))
    await asyncio.sleep(0)
    if newer:
        await me.snapshots.fetch(Move(step=STEP + 1, parts=await a.write(STEP + 1), peers=[a.peer]))
        assert (await me.reports.get()).step == STEP + 1
    else:
        await me.snapshots.keep(Keep(steps=[STEP + 1]))
    with pytest.raises(asyncio.CancelledError):
        await first
    assert me.reports.empty()


async def test_a_part_that_cannot_be_kept_leaves_nothing_behind(nodes: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, me = nodes
    parts = await a.write()

    def full(_: NewFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(NewFile, "finish", full)
    await me.snapshots.fetch(Move(step=STEP, parts=parts, peers=[a.peer]))
    assert "No space left" in (await me.reports.get()).problem
    assert [file for file in me.folder.rglob("*") if file.is_file()] == []


@settings(max_examples=settings().max_examples // 4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(0, 20), max_size=4))
def test_a_file_that_comes_from_donors_that_break_off_again_and_again_is_whole(
    tmp_path: Path, stops: list[int]
) -> None:
    """Donors break off after these numbers of frames; the file has 55 or so."""

    async def scenario() -> None:
        with TemporaryDirectory(dir=tmp_path) as folder:
            async with three_nodes(Path(folder)) as (a, b, me):
                parts = await a.write()
                await b.write()
                for part in parts:
                    part.nodes.append("b")
                for node in (a, b):
                    node.stops = list(stops)
                assert same(await restore(me, parts, a, b))

    asyncio.run(scenario())


async def test_a_file_that_is_fetched_is_in_memory_a_piece_at_a_time(nodes: Three) -> None:
    a, _, me = nodes
    specs = [BucketSpec(0, (0,), (("large", (4_000_000,)),))]
    live = [Bucket(spec, torch.device("cpu"), torch.float32) for spec in specs]
    a.snapshots.writer.write(STEP, live, a.images)
    (part,) = (await a.reports.get()).parts
    part.nodes.append("a")
    me.snapshots.open(loaded("me", RUN, specs))
    tracemalloc.start()
    try:
        await me.snapshots.fetch(Move(step=STEP, parts=[part], peers=[a.peer]))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (await me.reports.get()).problem == ""
    assert most < part.size_bytes / 3  # a, in the same process, has read the file too


@pytest.mark.parametrize(("step", "bucket"), [(STEP, 9), (STEP + 1, 0), (0, 0)])
async def test_a_request_for_a_file_that_is_not_there_is_refused(nodes: Three, step: int, bucket: int) -> None:
    a, _, _ = nodes
    await a.write()
    request = StateRequest(step=step, bucket=bucket, from_snapshot=True)
    async with open_channel(a.address, to_peer(member("me"), "a")) as channel:
        with pytest.raises(
            grpc.aio.AioRpcError, match=f"NOT_HELD: bucket {bucket} as of step {step} is in no snapshot on this disk"
        ):
            [frame async for frame in method(channel, "State")(request.SerializeToString())]


async def test_a_transfer_goes_on_where_it_stopped(nodes: Three) -> None:
    a, _, _ = nodes
    parts = await a.write()
    request = StateRequest(step=STEP, bucket=0, from_snapshot=True, offset=parts[0].size_bytes - 10)
    async with open_channel(a.address, to_peer(member("me"), "a")) as channel:
        (frame,) = [frame async for frame in method(channel, "State")(request.SerializeToString())]
    assert frame.endswith(get(a.disk, STEP, 0)[-10:])
