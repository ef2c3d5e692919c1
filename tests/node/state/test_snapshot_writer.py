"""What a node writes, to its own disk or into a checkpoint, and what it does if there is no room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from blake3 import blake3

from dtfm.node.data.storage import NewFile
from dtfm.node.model.bucket import Bucket, bucket_bytes
from dtfm.node.state import bucket_files, disk, snapshot_writer
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import file_name
from dtfm.protos.checkpoint_names import bucket_file
from dtfm.protos.control_pb2 import CHECKPOINT, DISKS, KeepSnapshots, SnapshotDestination
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


def with_checkpoints(folder: Path) -> Run:
    return Run(id=RUN.id, lease_seconds=2, checkpoint=Run.Checkpoint(uri=f"file://{folder}"))


def write(node: Node, destination: SnapshotDestination, folder: Path, step: int = STEP) -> None:
    node.snapshots.writer.write(loaded(node.name, with_checkpoints(folder)), step, destination, [*buckets().values()])


async def test_what_is_written_is_the_state_at_the_commit_and_named_by_its_digest(nodes: Three) -> None:
    a, _, _ = nodes
    live = buckets()
    contents = {index: content_of(bucket) for index, bucket in live.items()}
    a.begin_write(STEP, live)
    a.snapshots.writer.before_change()
    for bucket in live.values():
        bucket.parameters.fill_(9)  # the next step
    told = await a.reports.get()
    assert {p.bucket: (p.size_bytes, p.digest) for p in told.parts} == {
        index: (len(content), blake3(content).digest()) for index, content in contents.items()
    }
    assert same(await restore(a, list(told.parts)))
    assert a.given == 0


async def test_a_checkpoint_is_told_once_for_all_its_files_and_the_models_files_come_with_bucket_0(
    nodes: Three, tmp_path: Path
) -> None:
    a, _, me = nodes
    write(a, CHECKPOINT, tmp_path / "run")
    told = await a.reports.get()
    assert (told.step, told.destination, told.problem) == (STEP, CHECKPOINT, "")
    folder = tmp_path / "run" / f"step-{STEP:08d}"
    for part in told.parts:
        content = (folder / bucket_file(part.bucket, part.nonce)).read_bytes()
        assert (part.size_bytes, part.digest, list(part.nodes)) == (len(content), blake3(content).digest(), [])
    names = [bucket_file(part.bucket, part.nonce) for part in told.parts]
    assert sorted(file.name for file in folder.iterdir()) == [*sorted(names), "config.json"]
    assert a.contents == {}
    me.snapshots.writer.write(loaded("me", with_checkpoints(tmp_path / "other")), STEP, CHECKPOINT, [buckets()[1]])
    (part,) = (await me.reports.get()).parts
    assert part.bucket == 1
    name = bucket_file(1, part.nonce)
    assert [file.name for file in (tmp_path / "other" / f"step-{STEP:08d}").iterdir()] == [name]


async def test_a_node_with_nothing_to_write_into_a_checkpoint_answers_with_no_parts(nodes: Three) -> None:
    a, _, _ = nodes
    a.snapshots.writer.write(loaded("a"), STEP, CHECKPOINT, [])
    told = await a.reports.get()
    assert (told.step, told.destination, list(told.parts), told.problem) == (STEP, CHECKPOINT, [], "")


async def test_the_files_before_one_that_cannot_be_written_are_told(
    nodes: Three, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = nodes

    def only_the_first(folder: str, name: str) -> NewFile:
        if name.startswith("bucket-00001-"):
            raise IsADirectoryError(name)
        return NewFile(folder, name)

    monkeypatch.setattr(snapshot_writer, "NewFile", only_the_first)
    write(a, CHECKPOINT, tmp_path / "run")
    told = await a.reports.get()
    assert [part.bucket for part in told.parts] == [0]
    assert "IsADirectoryError" in told.problem


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (CHECKPOINT, CHECKPOINT, "the one before is still being written; raise checkpoint.every"),
        (DISKS, DISKS, "the one before is still being written"),
        (CHECKPOINT, DISKS, "the one before is still being written"),
        (DISKS, CHECKPOINT, ""),
    ],
)
async def test_a_snapshot_is_refused_while_the_one_before_is_written_but_a_checkpoint_waits_for_disks(
    nodes: Three, tmp_path: Path, first: SnapshotDestination, second: SnapshotDestination, problem: str
) -> None:
    a, _, _ = nodes
    go_on = threading.Event()
    a.snapshots.writer.submit(go_on.wait)
    write(a, first, tmp_path / "run", STEP)
    write(a, second, tmp_path / "run", STEP + 1)
    try:
        if problem:
            refused = await asyncio.wait_for(a.reports.get(), 10)
            assert (refused.step, refused.destination, list(refused.parts)) == (STEP + 1, second, [])
            assert refused.problem.endswith(problem)
    finally:
        go_on.set()
    told = [await a.reports.get() for _ in range(1 if problem else 2)]
    assert [(each.step, each.problem, len(each.parts)) for each in told] == [(STEP, "", 2), (STEP + 1, "", 2)][
        : len(told)
    ]


async def test_only_the_whole_snapshot_and_the_one_under_way_stay_on_disk(nodes: Three) -> None:
    a, _, _ = nodes
    await a.write(1)
    await a.write(2)
    assert a.contents == {2: [0, 1]}  # the first was never whole
    await a.snapshots.keep(KeepSnapshots(whole=2))
    await a.write(3)
    await a.write(4)
    assert a.contents == {2: [0, 1], 4: [0, 1]}
    await a.snapshots.keep(KeepSnapshots(whole=4))
    assert a.contents == {4: [0, 1]}


async def test_a_new_process_tells_what_is_on_disk_and_a_finished_run_leaves_nothing(nodes: Three) -> None:
    a, _, _ = nodes
    parts = await a.write()
    a.snapshots.writer.close()
    a.snapshots = a.process()
    assert a.earlier == {STEP: [0, 1]}
    assert same(await restore(a, parts))
    a.snapshots.remove()
    a.snapshots.writer.close()
    assert list(a.folder.iterdir()) == []


async def test_only_the_newest_of_what_cannot_be_removed_is_told(nodes: Three) -> None:
    a, _, _ = nodes
    for step in range(1, 10):
        put(a.disk, step, 0, b"state")
    put(a.disk, 9, 8, b"of a bucket that the model does not have")
    a.snapshots.writer.close()
    a.snapshots = a.process()
    assert a.earlier == {6: [0], 7: [0], 8: [0], 9: [0]}


async def test_a_disk_without_room_is_not_filled(nodes: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, me = nodes
    parts = await a.write()
    monkeypatch.setattr(disk, "FREE_SPACE_FRACTION", 1e-12)
    me.begin_write()
    assert "bytes free" in (await me.reports.get()).problem
    await me.snapshots.keep(KeepSnapshots(under_way=STEP, missing=parts, peers=[a.peer]))
    told = await me.reports.get()
    assert ("bytes free" in told.problem, list(told.parts)) == (True, [])
    assert same(await restore(me, parts, a))  # it can use what it cannot keep


async def held_up(node: Node, destination: SnapshotDestination, folder: Path) -> tuple[str, int]:
    """What is said of a snapshot that is not begun when the state changes, and the number of its parts."""
    go_on, live = threading.Event(), buckets()
    node.snapshots.writer.submit(go_on.wait)
    node.snapshots.writer.write(loaded(node.name, with_checkpoints(folder)), STEP, destination, [*live.values()])
    node.snapshots.writer.before_change()
    for bucket in live.values():
        bucket.parameters.fill_(9)  # the next step
    go_on.set()
    told = await node.reports.get()
    for part in told.parts:
        part.nodes.append(node.name)
    if destination == DISKS and not told.problem:
        assert same(await restore(node, list(told.parts)))
    return told.problem, len(told.parts)


async def test_without_memory_for_copies_they_go_to_the_nodes_disk_and_do_not_stay_there(
    nodes: Three, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = nodes
    monkeypatch.setattr(bucket_files, "free_memory", lambda device: 1000)  # enough for the second bucket
    sizes, scratch = list[int](), Disk.scratch

    def noted(disk: Disk, size_bytes: int) -> BinaryIO:
        sizes.append(size_bytes)
        return scratch(disk, size_bytes)

    monkeypatch.setattr(Disk, "scratch", noted)
    for destination in (DISKS, CHECKPOINT):
        assert await held_up(a, destination, tmp_path / "run") == ("", 2)
    first = bucket_bytes(buckets()[0].spec, torch.float32)
    assert sizes == [first, first]
    assert {file.name for file in a.folder.rglob("*") if file.is_file()} == {file_name(0), file_name(1)}


async def test_without_memory_and_disk_for_copies_the_snapshot_fails_and_says_why(
    nodes: Three, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = nodes
    with monkeypatch.context() as patched:
        patched.setattr(bucket_files, "free_memory", lambda device: 1000)
        patched.setattr(disk, "FREE_SPACE_FRACTION", 1e-12)
        problem, parts = await held_up(a, CHECKPOINT, tmp_path / "run")
    assert parts == 0
    first = bucket_bytes(buckets()[0].spec, torch.float32)
    assert f"the state of bucket 0 was about to change before it was written, and {first} bytes of it" in problem
    assert "of which 500 bytes may be used, nor on this node's disk" in problem
    assert "give the node more memory or --snapshots on a larger disk" in problem
    assert not list((tmp_path / "run").rglob("bucket-*"))
    await a.write(STEP + 1)


async def test_state_that_changes_while_its_file_is_written_is_written_as_it_was(
    nodes: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = nodes
    live, asked, changed = buckets(), threading.Event(), threading.Event()
    monkeypatch.setattr(bucket_files, "PIECE_BYTES", 1 << 20)
    read = Bucket.read

    def slow(bucket: Bucket, begin: int = 0, end: int | None = None) -> memoryview:
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
    a.snapshots.writer.before_change()
    for bucket in live.values():
        bucket.parameters.fill_(9)
        bucket.exp_avg.fill_(9)
        bucket.exp_avg_sq.fill_(9)
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

    def no_memory(*_: object) -> memoryview:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "read", no_memory)
        a.begin_write()
        if changes:
            a.snapshots.writer.before_change()
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

    def keep(whole: int, under_way: int) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(me.disk, "keep", keep)
    await me.snapshots.keep(KeepSnapshots(under_way=STEP, missing=parts, peers=[a.peer]))
    assert (await me.reports.get()).problem == "PermissionError: read-only"
