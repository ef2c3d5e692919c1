"""A reader gets the state of the moment when reading began, even if the state has changed since."""

from __future__ import annotations

import gc
import resource
import tempfile
import weakref
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st

from dtfm.node.data.shared.storage import NewFile
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state import images
from dtfm.node.state.images import PIECES_BYTES, Images, Scratch, no_scratch
from dtfm.node.state.state_store import HeldState, StateStore
from dtfm.protos.control_pb2 import Commit
from dtfm.protos.peer_pb2 import StateRequest

CPU = torch.device("cpu")
FRAME = 8


def some_buckets(count: int = 3) -> list[Bucket]:
    buckets = [Bucket(BucketSpec(i, (i,), (("weight", (2, 3)),)), CPU, torch.float32) for i in range(count)]
    for number, tensor in enumerate(tensor for bucket in buckets for tensor in bucket.state):
        tensor.fill_(number)
    return buckets


def large_bucket(mib: int) -> Bucket:
    bucket = Bucket(BucketSpec(0, (0,), (("weight", ((mib << 18) // 3,)),)), CPU, torch.float32)
    for tensor in bucket.state:
        tensor.fill_(1)  # zeros need not be in memory
    return bucket


def change(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        for tensor in bucket.state:
            tensor.add_(100)


def scratch(_: int) -> BinaryIO:
    return tempfile.TemporaryFile()


def small_pieces() -> AbstractContextManager[Any]:
    """Of a frame each."""
    return mock.patch.multiple(images, PIECE_BYTES=FRAME, STATE_CHUNK_BYTES=FRAME)


def memory(free: int) -> AbstractContextManager[Any]:
    return mock.patch.object(images, "free_memory", return_value=free)


@given(
    readers=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 80), st.integers(0, 10)), max_size=8),
    changes=st.integers(0, 3),
    free=st.integers(0, 500),
)
def test_each_reading_has_the_state_as_it_was(readers: list[tuple[int, int, int]], changes: int, free: int) -> None:
    """``readers``: their bucket, first byte, and pieces read before the state changes. ``free`` bytes of memory are enough for
    all copies, for some or for none."""
    buckets, of = some_buckets(), Images(scratch)
    expected = [bytes(bucket.read()) for bucket in buckets]
    with small_pieces(), memory(free):
        readings = [of.read(buckets[number], offset) for number, offset, _ in readers]
        begun = [b"".join(islice(reading, pieces)) for reading, (*_, pieces) in zip(readings, readers, strict=True)]
        for _ in range(changes):
            of.keep()
            change(buckets)
        for first, reading, (number, offset, _) in zip(begun, readings, readers, strict=True):
            assert first + b"".join(reading) == expected[number][offset:]
            assert reading.size_bytes == len(expected[number][offset:])


def test_what_several_have_not_read_yet_is_copied_once_and_nothing_before_it_is_needed() -> None:
    buckets, of = some_buckets(), Images()
    with mock.patch.object(Bucket, "read", autospec=True, side_effect=Bucket.read) as reading:
        readers = [of.read(buckets[0]) for _ in range(5)]
        assert reading.call_count == 0
        of.keep()
        change(buckets)
        of.keep()
        assert reading.call_count == 1
        assert len({b"".join(reader) for reader in readers}) == 1
        assert reading.call_count == 1


def test_readers_that_have_all_or_are_gone_cost_no_copy() -> None:
    buckets, of = some_buckets(), Images()
    done, gone = of.read(buckets[0]), of.read(buckets[1])
    assert list(done)
    del gone
    with mock.patch.object(Bucket, "read") as reading:
        of.keep()
    assert sum(call.args[1] - call.args[0] for call in reading.call_args_list) == 0


@pytest.mark.parametrize("free", [0, 1 << 20])
def test_what_is_copied_keeps_no_memory_of_the_stage(free: int) -> None:
    """The node may be given another stage while the old one's state is still being read."""
    buckets, of = some_buckets(), Images(scratch)
    references = [weakref.ref(bucket) for bucket in buckets]
    readings = [of.read(bucket) for bucket in buckets]
    with memory(free):
        of.keep()
    buckets.clear()
    gc.collect()
    assert not any(reference() for reference in references)
    assert all(map(list, readings))


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("no_room", [no_scratch, mock.Mock(side_effect=OSError("the disk is full"))])
def test_where_there_is_no_room_for_copies_the_state_is_lost_to_its_readers_and_training_goes_on(
    is_begun: bool, no_room: Scratch
) -> None:
    buckets, of = some_buckets(), Images(no_room)
    reading = of.read(buckets[0])
    with small_pieces(), memory(100):
        if is_begun:
            next(reading)
        of.keep()
        change(buckets)
        left = 64 if is_begun else 72
        with pytest.raises(OSError, match=f"{left} bytes of it fit neither in memory, of which 50 .*--snapshots"):
            list(reading)
    assert list(of.read(buckets[0]))


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("mib", "changes"), [(256, False), (128, True)], ids=["state stays", "state changes, and memory is short"]
)
def test_a_large_bucket_is_written_with_a_few_mib_of_memory(tmp_path: Path, mib: int, changes: bool) -> None:
    of, bucket = Images(scratch), large_bucket(mib)
    most, before = 0, resident()
    with NewFile(str(tmp_path), "bucket") as target, memory(1 << 20):
        reading = of.read(bucket)
        if changes:
            of.keep()
        assert reading.size_bytes > (mib - 1) << 20
        for piece in reading:
            most = max(most, resident() - before)
            target.write(piece)
    assert most < (mib << 20) / 3


def test_however_many_ask_for_a_bucket_their_pieces_together_take_what_one_budget_allows() -> None:
    bucket, store = large_bucket(12), StateStore()
    store.replace(HeldState(3, {0: bucket}))
    for readers in (8, 160):
        donations = [store.donate(StateRequest(step=3, bucket=0))[1] for _ in range(readers)]
        assert sum(len(next(pieces)) for pieces in donations) <= PIECES_BYTES
        del donations


def test_a_donation_is_over_when_the_state_has_changed_and_no_copy_is_made_for_it() -> None:
    """Who asks is to take part in the next step. A member that reads slowly would make every commit wait for copies."""
    bucket, store = large_bucket(12), StateStore()
    store.replace(HeldState(3, {0: bucket}))
    pieces = store.donate(StateRequest(step=3, bucket=0))[1]
    next(pieces)
    with mock.patch.object(Bucket, "read") as reading:
        store.apply(Commit(step=4), lambda: None)
    assert not reading.called
    with pytest.raises(LookupError, match="NOT_HELD: bucket 0 has changed"):
        next(pieces)


@pytest.mark.parametrize(("offset", "end"), [(24, 72), (30, 72), (72, 72), (80, 72), (24, 0), (24, 10**9)])
def test_a_donation_may_be_of_some_bytes_alone(offset: int, end: int) -> None:
    """Of 3 tensors of 24 bytes."""
    store = StateStore()
    store.replace(HeldState(3, {0: some_buckets(1)[0]}))
    whole = b"".join(store.donate(StateRequest(step=3, bucket=0))[1])
    header, pieces = store.donate(StateRequest(step=3, bucket=0, offset=offset, end=end))
    expected = whole[offset : end or None]
    assert (b"".join(pieces), header.total) == (expected, len(expected))
