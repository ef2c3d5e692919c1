"""What a node writes to its own disk, for what becomes of it, and what it makes of a disk or memory that is full."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest
from blake3 import blake3

from dtfm.node.model.bucket import Bucket
from dtfm.node.state import disk, snapshot, state_files
from dtfm.node.state.snapshot_files import to_file
from dtfm.protos.control_pb2 import Keep
from tests.node.state.snapshot_nodes import STEP, Three, buckets, restore, same, three_nodes


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Three]:
    async with three_nodes(tmp_path) as nodes:
        yield nodes


async def test_what_is_written_is_as_it_was_at_the_commit_and_named_by_its_digest(
    nodes: Three,
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


async def test_only_the_whole_one_and_the_one_under_way_stay_on_disk(nodes: Three) -> None:
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
    nodes: Three,
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


async def test_of_what_cannot_be_removed_only_the_newest_is_told(nodes: Three) -> None:
    a, _, _ = nodes
    for step in range(1, 10):
        a.disk.write(step, 0, b"state")
    a.disk.write(9, 8, b"of no such bucket")
    a.keeper.close()
    a.keeper = a.process()
    assert a.earlier == {6: [0], 7: [0], 8: [0], 9: [0]}


async def test_a_disk_without_room_is_not_filled(nodes: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, me = nodes
    parts = await a.write()
    monkeypatch.setattr(disk, "ROOM_SHARE", 1e-12)
    me.keeper.write(STEP, list(buckets().values()))
    assert "bytes free" in (await me.reports.get()).problem
    await me.keeper.keep(Keep(begun=STEP, missing=parts, peers=[a.peer]))
    kept = await me.reports.get()
    assert ("bytes free" in kept.problem, list(kept.parts)) == (True, [])
    assert same(await restore(me, parts, a))  # it can use what it cannot keep


async def test_without_memory_for_copies_nothing_is_written(nodes: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, _ = nodes
    monkeypatch.setattr(snapshot, "free_memory", lambda device: 1 << 20)
    a.keeper.write(STEP, list(buckets().values()))
    assert "too much for 1048576 bytes of free memory" in (await a.reports.get()).problem
    assert a.contents == {}


@pytest.mark.parametrize("meanwhile", [False, True], ids=["as it is", "state changes"])
async def test_state_that_cannot_be_copied_costs_the_backup_and_no_step(
    nodes: Three, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
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


async def test_without_a_thread_to_write_it_a_backup_fails_and_no_step(nodes: Three) -> None:
    a, _, _ = nodes
    a.keeper.close()
    a.keeper.write(STEP, list(buckets().values()))
    assert "cannot schedule" in (await a.reports.get()).problem


async def test_what_cannot_be_kept_is_said_whatever_it_is(nodes: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, me = nodes
    parts = await a.write()

    def keep(_: Collection[int]) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(me.disk, "keep", keep)
    await me.keeper.keep(Keep(begun=STEP, missing=parts, peers=[a.peer]))
    assert (await me.reports.get()).problem == "PermissionError: read-only"
