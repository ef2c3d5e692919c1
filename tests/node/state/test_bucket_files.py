"""Files have the state as it was when they were requested, whenever they are written."""

from __future__ import annotations

import gc
import resource
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st

from dtfm.node.data.storage import NewFile
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state import bucket_files
from dtfm.node.state.bucket_files import BucketFile, BucketFiles
from tests.node.state.snapshot_nodes import content_of

CPU = torch.device("cpu")


def some_buckets(count: int = 3) -> list[Bucket]:
    buckets = [Bucket(BucketSpec(i, (i,), (("weight", (2, 3)),)), CPU, torch.float32) for i in range(count)]
    for number, tensor in enumerate(tensor for bucket in buckets for tensor in bucket.state):
        tensor.fill_(number)
    return buckets


def change(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        for tensor in bucket.state:
            tensor.add_(100)


def scratch(_: int) -> BinaryIO:
    return tempfile.TemporaryFile()


def no_scratch(_: int) -> BinaryIO:
    raise OSError("the disk is full")


def read(file: BucketFile | None) -> tuple[int, bytes]:
    assert file is not None
    content = b"".join(file.pieces)
    assert len(content) == file.size_bytes
    return file.bucket, content


@given(taken_before=st.integers(0, 3), steps=st.integers(0, 3), piece=st.integers(1, 100), free=st.integers(0, 500))
def test_each_bucket_is_taken_once_and_as_it_was(taken_before: int, steps: int, piece: int, free: int) -> None:
    """``free`` bytes of memory: enough for all copies, for some or for none."""
    buckets = some_buckets()
    expected = {bucket.spec.index: content_of(bucket) for bucket in buckets}
    with (
        mock.patch.object(bucket_files, "PIECE_BYTES", piece),
        mock.patch.object(bucket_files, "free_memory", return_value=free),
    ):
        files = BucketFiles(buckets, scratch)
        taken = [read(files.take()) for _ in range(taken_before)]
        for _ in range(steps):
            files.keep()
            change(buckets)
        while (file := files.take()) is not None:
            taken.append(read(file))
    assert len(taken) == len(buckets)
    assert dict(taken) == expected


@given(pieces_before=st.integers(0, 12), free=st.sampled_from([0, 1 << 30]))
def test_a_file_that_is_half_written_when_the_state_changes_is_written_as_it_was(pieces_before: int, free: int) -> None:
    (bucket,) = buckets = some_buckets(1)
    expected = content_of(bucket)
    with (
        mock.patch.object(bucket_files, "PIECE_BYTES", 8),
        mock.patch.object(bucket_files, "free_memory", return_value=free),
    ):
        files = BucketFiles(buckets, scratch)
        file = files.take()
        assert file is not None
        content = b"".join(piece for _, piece in zip(range(pieces_before), file.pieces, strict=False))
        files.keep()
        change(buckets)
        assert content + b"".join(file.pieces) == expected


def test_nothing_is_copied_before_it_is_needed() -> None:
    with mock.patch.object(Bucket, "read", autospec=True, side_effect=Bucket.read) as reading:
        files = BucketFiles(some_buckets(), scratch)
        assert reading.call_count == 0
        read(files.take())
        before = reading.call_count
        files.keep()
        assert reading.call_count == before + 2


@pytest.mark.parametrize("free", [0, 1 << 20])
def test_what_is_copied_keeps_no_memory_of_the_stage(free: int) -> None:
    """The node may be given another stage while a file of the old one is still being written."""
    buckets = some_buckets()
    references = [weakref.ref(bucket) for bucket in buckets]
    files = BucketFiles(buckets, scratch)
    with mock.patch.object(bucket_files, "free_memory", return_value=free):
        files.keep()
    buckets.clear()
    gc.collect()
    assert not any(reference() for reference in references)
    assert read(files.take())[0] == 0


@pytest.mark.parametrize("kept", [False, True])
def test_dropped_files_are_neither_kept_nor_taken(kept: bool) -> None:
    files = BucketFiles(some_buckets(), scratch)
    if kept:
        files.keep()
    files.drop()
    assert files.take() is None


def begun(files: BucketFiles) -> Callable[[], object]:
    file = files.take()
    assert file is not None
    next(file.pieces)
    return lambda: list(file.pieces)


@pytest.mark.parametrize("is_begun", [False, True])
def test_where_there_is_no_room_for_copies_the_files_are_lost(is_begun: bool) -> None:
    files = BucketFiles(some_buckets(), no_scratch)
    go_on = begun(files) if is_begun else files.take
    with mock.patch.object(bucket_files, "free_memory", return_value=100):
        files.keep()
    with pytest.raises(
        OSError, match=r"72 bytes of it fit neither in memory, of which 50 .*the disk is full.*--snapshots"
    ):
        go_on()


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("mib", "changes"), [(256, False), (128, True)], ids=["state stays", "state changes, and memory is short"]
)
def test_a_large_bucket_is_written_with_a_few_mib_of_memory(tmp_path: Path, mib: int, changes: bool) -> None:
    bucket = Bucket(BucketSpec(0, (0,), (("weight", ((mib << 18) // 3,)),)), CPU, torch.float32)
    for tensor in bucket.state:
        tensor.fill_(1)  # zeros need not be in memory
    most, before = 0, resident()
    with (
        NewFile(str(tmp_path), "bucket") as target,
        mock.patch.object(bucket_files, "free_memory", return_value=1 << 20),
    ):
        files = BucketFiles([bucket], scratch)
        if changes:
            files.keep()
        file = files.take()
        assert file is not None
        assert file.size_bytes > (mib - 1) << 20
        for piece in file.pieces:
            most = max(most, resident() - before)
            target.write(piece)
    assert most < (mib << 20) / 3
