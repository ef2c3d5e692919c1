"""What nodes fetch from others' disks, to keep it or to go back to it, and what they make of damage."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state import snapshot
from dtfm.node.state.snapshot import BackupError
from dtfm.node.state.state_store import Piece
from dtfm.node.training.failure import plan_failed
from dtfm.protos.connection import open_channel
from dtfm.protos.control_pb2 import Keep, Part, Peer
from dtfm.protos.credentials import to_peer
from dtfm.protos.frame import STATE_CHUNK_BYTES
from dtfm.protos.peer_pb2 import StateRequest
from dtfm.protos.streams import state_call
from tests.cluster.relay import Relay
from tests.node.state.snapshot_nodes import RUN, SHORT, SPECS, STEP, Three, frames_of, restore, same, three_nodes
from tests.protos.members import member


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Three]:
    async with three_nodes(tmp_path) as nodes:
        yield nodes


async def test_another_nodes_part_is_fetched_onto_disk_once(nodes: Three) -> None:
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
    nodes: Three,
) -> None:
    a, _, me = nodes
    parts = await a.write()
    await me.keeper.keep(Keep(begun=STEP, missing=parts[1:], peers=[a.peer]))
    await me.keeper.keep(Keep(whole=STEP))
    given = a.given
    assert same(await restore(me, parts, a))
    assert a.given - given == frames_of(parts[0])
    assert me.contents == {STEP: [0, 1]}


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


async def test_of_two_who_gave_a_damaged_file_together_the_one_who_broke_off_is_passed_over(
    nodes: Three,
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


async def test_where_all_are_damaged_that_is_said(nodes: Three) -> None:
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
async def test_what_is_no_state_at_all_is_no_backup(nodes: Three, here: bool) -> None:
    a, _, me = nodes
    garbage = b"\xff" * 100
    (me if here else a).disk.write(STEP, 1, garbage)
    part = Part(bucket=1, size_bytes=len(garbage), digest=blake3(garbage).digest(), nodes=["a"])
    with pytest.raises(BackupError, match=f"step {STEP} cannot be had"):
        await restore(me, [part], a)


async def test_that_nobody_is_there_who_has_a_part_is_no_damage(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    with pytest.raises(ConnectionError, match="nobody who is known has bucket 0") as caught:
        await restore(me, parts)
    assert not plan_failed(1, caught.value).backup


async def test_that_who_had_a_part_is_out_of_reach_is_no_damage(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    me.keeper.open(SHORT, SPECS, member("me"))
    a.address = "127.0.0.1:1"
    with pytest.raises(ConnectionError, match=f"step {STEP} cannot be had: .* a at 127.0.0.1:1: UNAVAILABLE"):
        await restore(me, parts, a)


async def test_that_who_had_a_part_has_lost_it_is_damage_and_known_at_once(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    a.disk.remove()
    began = time.monotonic()
    with pytest.raises(BackupError, match="NOT_HELD: there is no backup of bucket"):
        await restore(me, parts, a)
    assert time.monotonic() - began < RUN.lease_seconds


async def test_a_part_that_the_model_cannot_have_is_not_asked_for(nodes: Three) -> None:
    a, _, me = nodes
    parts = await a.write()
    parts[1].size_bytes += 2 << 20
    with pytest.raises(BackupError, match="the model has no bucket 1 whose file has"):
        await restore(me, parts, a)
    await me.keeper.keep(Keep(begun=STEP, missing=[Part(bucket=9, digest=bytes(32), nodes=["a"])], peers=[a.peer]))
    assert "the model has no bucket 9" in (await me.reports.get()).problem
    assert a.given == 0


async def test_over_a_link_that_takes_two_leases_for_them_two_parts_arrive_at_once(
    nodes: Three,
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
    nodes: Three, monkeypatch: pytest.MonkeyPatch
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


async def test_a_newer_wish_takes_the_place_of_the_one_before(nodes: Three) -> None:
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


async def test_without_memory_for_what_others_have_nothing_is_fetched(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, me = nodes
    parts = await a.write()
    monkeypatch.setattr(snapshot, "free_memory", lambda device: parts[0].size_bytes)
    await me.keeper.keep(Keep(begun=STEP, missing=parts, peers=[a.peer]))
    assert f"too much for {parts[0].size_bytes} bytes of free memory" in (await me.reports.get()).problem
    with pytest.raises(OSError, match="too much for") as caught:
        await restore(me, parts, a)
    assert not plan_failed(1, caught.value).backup
    assert a.given == 0


@given(content=st.binary(max_size=60), passes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4))
def test_a_file_whose_pieces_come_again_from_an_earlier_one_on_is_as_it_was(
    content: bytes, passes: list[tuple[int, int]]
) -> None:
    came: list[bytes] = []
    part = Part(bucket=0, size_bytes=len(content), digest=blake3(content).digest())
    incoming, have = snapshot._Incoming(part, lambda _, whole: came.append(whole)), 0
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
        incoming = snapshot._Incoming(part, lambda _, whole: None)
        for at in range(0, len(content), STATE_CHUNK_BYTES):
            incoming.take(memoryview(content)[at : at + STATE_CHUNK_BYTES], at)
        monkeypatch.setattr(snapshot, "blake3", None)
        assert await incoming.finish() == ""
        assert tracemalloc.get_traced_memory()[1] < 1.3 * len(content)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("step", "bucket"), [(STEP, 9), (STEP + 1, 0), (0, 0)])
async def test_who_asks_for_what_is_not_there_hears_so(nodes: Three, step: int, bucket: int) -> None:
    a, _, _ = nodes
    await a.write()
    request = StateRequest(step=step, bucket=bucket, backup=True)
    async with open_channel(a.address, to_peer(member("me"), "a")) as channel:
        with pytest.raises(
            grpc.aio.AioRpcError, match=f"NOT_HELD: there is no backup of bucket {bucket} as of step {step}"
        ):
            [frame async for frame in state_call(channel)(request.SerializeToString())]


async def test_a_transfer_goes_on_where_it_stopped(nodes: Three) -> None:
    a, _, _ = nodes
    parts = await a.write()
    request = StateRequest(step=STEP, bucket=0, backup=True, offset=parts[0].size_bytes - 10)
    async with open_channel(a.address, to_peer(member("me"), "a")) as channel:
        (frame,) = [frame async for frame in state_call(channel)(request.SerializeToString())]
    assert frame.endswith(a.disk.read(STEP, 0)[-10:])
