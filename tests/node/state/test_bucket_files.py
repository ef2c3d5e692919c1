"""Files have the state as it was when they were requested, whenever they are made."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state import bucket_files
from dtfm.node.state.bucket_files import BucketFiles
from dtfm.node.state.snapshot_files import to_file


def some_buckets(count: int = 3) -> list[Bucket]:
    buckets = [
        Bucket(BucketSpec(i, (i,), (("weight", (2, 3)),)), torch.device("cpu"), torch.float32) for i in range(count)
    ]
    for number, tensor in enumerate(tensor for bucket in buckets for tensor in bucket.state):
        tensor.fill_(number)
    return buckets


def change(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        for tensor in bucket.state:
            tensor.add_(100)


@given(taken_before=st.integers(0, 3), steps=st.integers(0, 3))
def test_each_bucket_is_taken_once_and_as_it_was(taken_before: int, steps: int) -> None:
    buckets = some_buckets()
    expected = {bucket.spec.index: to_file(bucket) for bucket in buckets}
    files = BucketFiles(buckets)
    taken = [files.take() for _ in range(taken_before)]
    for _ in range(steps):
        files.finish()
        change(buckets)
    while (file := files.take()) is not None:
        taken.append(file)
    assert len(taken) == len(buckets)
    assert dict(file for file in taken if file is not None) == expected


def test_no_file_is_made_before_it_is_needed() -> None:
    with mock.patch.object(bucket_files, "to_file", wraps=to_file) as making:
        files = BucketFiles(some_buckets())
        assert making.call_count == 0
        files.take()
        assert making.call_count == 1
        files.finish()
        assert making.call_count == 3


@pytest.mark.parametrize("made", [False, True])
def test_dropped_files_are_neither_made_nor_taken(made: bool) -> None:
    files = BucketFiles(some_buckets())
    if made:
        files.finish()
    files.drop()
    assert files.take() is None


@pytest.mark.parametrize("made", [False, True])
def test_an_error_takes_the_place_of_a_file_that_cannot_be_made(made: bool) -> None:
    contents = [b"first", MemoryError("second"), b"third"]
    with mock.patch.object(bucket_files, "to_file", side_effect=contents):
        files = BucketFiles(some_buckets())
        if made:
            files.finish()
        assert [files.take() for _ in range(4)] == [*enumerate(contents), None]
