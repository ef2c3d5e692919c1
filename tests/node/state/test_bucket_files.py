"""Files of the state as it was when they were asked for, whenever they are made."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state import state_files
from dtfm.node.state.snapshot_files import to_file
from dtfm.node.state.state_files import StateFiles


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
    files = StateFiles(buckets)
    taken = [files.take() for _ in range(taken_before)]
    for _ in range(steps):
        files.finish()
        change(buckets)
    while (file := files.take()) is not None:
        taken.append(file)
    assert len(taken) == len(buckets)
    assert dict(file for file in taken if file is not None) == expected


def test_none_is_made_before_it_is_needed() -> None:
    with mock.patch.object(state_files, "to_file", wraps=to_file) as making:
        files = StateFiles(some_buckets())
        assert making.call_count == 0
        files.take()
        assert making.call_count == 1
        files.finish()
        assert making.call_count == 3


@pytest.mark.parametrize("made", [False, True])
def test_what_was_dropped_is_neither_made_nor_taken(made: bool) -> None:
    files = StateFiles(some_buckets())
    if made:
        files.finish()
    files.drop()
    assert files.take() is None


@pytest.mark.parametrize("made", [False, True])
def test_a_file_that_cannot_be_made_is_an_error_in_its_place(made: bool) -> None:
    contents = [b"first", MemoryError("second"), b"third"]
    with mock.patch.object(state_files, "to_file", side_effect=contents):
        files = StateFiles(some_buckets())
        if made:
            files.finish()
        assert [files.take() for _ in range(4)] == [*enumerate(contents), None]
