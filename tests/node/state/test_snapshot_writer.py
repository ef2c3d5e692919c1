"""What a node writes to its own disk, and what it does if there is no room."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from blake3 import blake3

from dtfm.node.data.shared.storage import NewFile
from dtfm.node.model.bucket import Bucket, bucket_bytes
from dtfm.node.state import disk, images
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import file_name
from dtfm.protos.control_pb2 import Keep, Move, Moved
from dtfm.protos.plan_pb2 import Run
from tests.node.state.snapshot_nodes import (
    RUN,
    STEP,
    Node,
    Three,
    buckets,
    content_of,
    loaded,
    put,
    restore,
    same,
    three_nodes,
)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Three]:
    async with three_nodes(tmp_path) as nodes:
        yield nodes


async def test_what_is_written_is_the_state_at_the_commit_and_named_by_its_digest(nodes: Three) -> None:
    a, _, _ = nodes
    live = buckets()
    contents = {index: content_of(bucket) for index, bucket in live.items()}
    a.begin_write(STEP, live)
    a.images.keep()
    for bucket in live.values():
        bucket.parameters.fill_(9)  # the next step
    told = await a.reports.get()
    assert {p.bucket: (p.size_bytes, p.digest) for p in told.parts} == {
        index: (len(content), blake3(content).digest()) for index, content in contents.items()
    }
    assert same(await restore(a, list(told.parts)))
    assert a.given == 0


async def test_the_files_before_one_that_cannot_be_written_are_told(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = nodes

    def only_the_first(folder: str, name: str) -> NewFile:
        if name == file_name(1):
            raise IsADirectoryError(name)
        return NewFile(folder, name)

    monkeypatch.setattr(disk, "NewFile", only_the_first)
    a.begin_write()
    told = await a.reports.get()
    assert [part.bucket for part in told.parts] == [0]
    assert "IsADirectoryError" in told.problem


async def test_a_snapshot_is_refused_while_the_one_before_is_written(nodes: Three) -> None:
    a, _, _ = nodes
    go_on = threading.Event()
    a.snapshots.writer.submit(go_on.wait)
    a.begin_write(STEP)
    a.begin_write(STEP + 1)
    try:
        refused = await asyncio.wait_for(a.reports.get(), 10)
        assert (refused.step, list(refused.parts)) == (STEP + 1, [])
        assert refused.problem.endswith("the one before is still being written")
    finally:
        go_on.set()
    told = await a.reports.get()
    assert (told.step, told.problem, len(told.parts)) == (STEP, "", 2)
    await a.write(STEP + 2)


async def test_only_the_snapshots_that_the_coordinator_wants_stay_on_disk(nodes: Three) -> None:
    a, _, _ = nodes
    for step in (1, 2, 3):
        await a.write(step)
    await a.snapshots.keep(Keep(steps=[2, 3, 4]))
    assert a.contents == {2: [0, 1], 3: [0, 1]}


async def test_a_new_process_tells_what_is_on_disk(nodes: Three) -> None:
    a, _, _ = nodes
    parts = await a.write()
    a.snapshots.close()
    a.snapshots = a.process()
    assert a.earlier == {STEP: [0, 1]}
    assert same(await restore(a, parts))


@pytest.mark.parametrize("weights", [False, True])
async def test_a_finished_run_leaves_its_state_on_disk_only_if_its_checkpoints_lack_it(
    nodes: Three, weights: bool
) -> None:
    a, _, _ = nodes
    await a.write()
    a.snapshots.open(loaded("a", Run(id=RUN.id, checkpoint=Run.Checkpoint(weights=weights))))
    a.snapshots.run_is_over()
    a.snapshots.close()
    assert a.contents == ({STEP: [0, 1]} if weights else {})
    assert weights or list(a.folder.iterdir()) == []


async def test_only_the_newest_of_what_cannot_be_removed_is_told(nodes: Three) -> None:
    a, _, _ = nodes
    for step in range(1, 10):
        put(a.disk, step, 0, b"state")
    put(a.disk, 9, 8, b"of a bucket that the model does not have")
    a.snapshots.close()
    a.snapshots = a.process()
    assert a.earlier == {6: [0], 7: [0], 8: [0], 9: [0]}


async def test_a_disk_without_room_is_not_filled(nodes: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, me = nodes
    parts = await a.write()
    monkeypatch.setattr(disk, "FREE_SPACE_FRACTION", 1e-12)
    me.begin_write()
    assert "bytes free" in (await me.reports.get()).problem
    await me.snapshots.fetch(Move(step=STEP, parts=parts, peers=[a.peer]))
    told = await me.reports.get()
    assert ("bytes free" in told.problem, list(told.parts)) == (True, [])
    assert same(await restore(me, parts, a))  # it can use what it cannot keep


async def held_up(node: Node) -> Moved:
    """What is said of a snapshot that is not begun when the state changes."""
    go_on, live = threading.Event(), buckets()
    node.snapshots.writer.submit(go_on.wait)
    node.begin_write(STEP, live)
    node.images.keep()
    for bucket in live.values():
        bucket.parameters.fill_(9)  # the next step
    go_on.set()
    return await node.reports.get()


async def test_without_memory_for_copies_they_go_to_the_nodes_disk_and_do_not_stay_there(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = nodes
    monkeypatch.setattr(images, "free_memory", lambda device: 1000)  # enough for the second bucket
    sizes, scratch = list[int](), Disk.scratch

    def noted(disk: Disk, size_bytes: int) -> BinaryIO:
        sizes.append(size_bytes)
        return scratch(disk, size_bytes)

    monkeypatch.setattr(Disk, "scratch", noted)
    told = await held_up(a)
    assert (told.problem, len(told.parts)) == ("", 2)
    assert same(await restore(a, list(told.parts)))
    assert sizes == [bucket_bytes(buckets()[0].spec, torch.float32)]
    assert {file.name for file in a.folder.rglob("*") if file.is_file()} == {file_name(0), file_name(1)}


async def test_without_memory_and_disk_for_copies_the_snapshot_fails_and_says_why(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = nodes

    def full(_: Disk, size_bytes: int) -> BinaryIO:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(images, "free_memory", lambda device: 1000)
        patched.setattr(Disk, "scratch", full)
        told = await held_up(a)
    assert list(told.parts) == []
    first = bucket_bytes(buckets()[0].spec, torch.float32)
    assert f"the state of bucket 0 was about to change before it was read, and {first} bytes of it" in told.problem
    assert "of which 500 bytes may be used, nor on this node's disk" in told.problem
    assert "give the node more memory or --snapshots on a larger disk" in told.problem
    assert not list(a.folder.rglob("bucket-*"))
    await a.write(STEP + 1)


async def test_state_that_changes_while_its_file_is_written_is_written_as_it_was(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = nodes
    live, asked, changed = buckets(), threading.Event(), threading.Event()
    monkeypatch.setattr(images, "PIECE_BYTES", 1 << 20)
    read = Bucket.read

    def slow(bucket: Bucket, begin: int = 0, end: int | None = None, **_: object) -> memoryview:
        if begin == 2 << 20 and threading.current_thread() is not threading.main_thread():
            asked.set()
        return read(bucket, begin, end)

    monkeypatch.setattr(Bucket, "read", slow)
    write_piece = NewFile.write

    def wait_for_the_change(file: NewFile, piece: bytes | memoryview) -> None:
        write_piece(file, piece)
        if asked.is_set():
            assert changed.wait(10)

    monkeypatch.setattr(NewFile, "write", wait_for_the_change)
    a.begin_write(STEP, live)
    assert await asyncio.to_thread(asked.wait, 10)
    a.images.keep()
    for bucket in live.values():
        bucket.parameters.fill_(9)
        bucket.moments[0].fill_(9)
        bucket.moments[1].fill_(9)
    changed.set()
    told = await a.reports.get()
    assert same(await restore(a, list(told.parts)))


@pytest.mark.parametrize("changes", [False, True], ids=["state stays", "state changes"])
async def test_state_that_cannot_be_copied_costs_the_snapshot_but_no_step(
    nodes: Three, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    a, _, _ = nodes
    go_on = threading.Event()
    if changes:
        a.snapshots.writer.submit(go_on.wait)

    def no_memory(*_: object, **__: object) -> memoryview:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "read", no_memory)
        a.begin_write()
        if changes:
            a.images.keep()
            go_on.set()
        assert "can't allocate memory" in (await a.reports.get()).problem
    await a.write(STEP + 1)


async def test_without_a_thread_to_write_it_a_snapshot_fails_but_no_step(nodes: Three) -> None:
    a, _, _ = nodes
    a.snapshots.writer.close()
    a.begin_write()
    assert "cannot schedule" in (await a.reports.get()).problem


async def test_any_error_in_keeping_a_snapshot_is_told(nodes: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, me = nodes
    parts = await a.write()

    def has(*_: object) -> bool:
        raise PermissionError("read-only")

    monkeypatch.setattr(me.disk, "has", has)
    await me.snapshots.fetch(Move(step=STEP, parts=parts, peers=[a.peer]))
    assert (await me.reports.get()).problem == "PermissionError: read-only"
