"""What a node needs no longer goes out of the way, and others still get it from there."""

from __future__ import annotations

import errno
import gc
import re
import tempfile
import weakref
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from dtfm.node.model.bucket import HOST, Bucket, BucketSpec
from dtfm.node.state.disk import Disk
from dtfm.node.state.images import Scratch
from dtfm.node.state.making_room import Aside, make_room
from dtfm.node.state.state_store import HeldState, StateStore
from dtfm.protos.peer_pb2 import StateRequest

META = torch.device("meta")
STEP = 7
SIZE = 5 * 3 * 4 * 3 * 1000
"""Bytes of a bucket's state, of three tensors of 4 bytes."""


def held(count: int = 4, *, momentum: bool = False) -> tuple[StateStore, dict[int, bytes]]:
    """A store, and what its buckets have, by index."""
    buckets = {}
    for index in range(count):
        spec = BucketSpec(index, (index,), (("weight", (5, 3, 1000)),), has_momentum=momentum)
        bucket = buckets[index] = Bucket(spec, HOST, torch.float32)
        for number, tensor in enumerate(bucket.state):
            tensor.uniform_(number, number + 1 + index)
        bucket.gradients.fill_(1)
        bucket.rest(rounds=momentum)
    store = StateStore()
    store.replace(HeldState(STEP, buckets))
    return store, {index: bytes(bucket.read()) for index, bucket in buckets.items()}


def scratch(size: int) -> BinaryIO:
    return tempfile.TemporaryFile()


def room_for(
    store: StateStore, needed: set[int], expected: set[int], host_bytes: int = -1, scratch: Scratch = scratch
) -> dict[Aside, int]:
    return make_room(
        store,
        needed=needed,
        expected=expected,
        placed=partial(Bucket.placed, device=HOST, home=HOST),
        host_bytes=host_bytes,
        scratch=scratch,
    )


def donated(store: StateStore, bucket: int, offset: int = 0) -> bytes:
    return b"".join(store.donate(StateRequest(step=STEP, bucket=bucket, offset=offset))[1])


@pytest.mark.parametrize("momentum", [False, True])
def test_what_others_expect_is_on_the_disk_and_they_get_it_from_there(momentum: bool) -> None:
    store, content = held(momentum=momentum)
    digests = {index: bucket.digests() for index, bucket in store.held.buckets.items()}
    moved = room_for(store, needed={1, 2}, expected={0, 1})
    assert moved == {Aside.DISK: SIZE // 3 * (3 + momentum), Aside.HOST: 0}
    assert {*store.held.buckets} == {0, 1}  # 2 is needed, but comes from somewhere else; nobody expects 3
    assert {index: bucket.is_aside for index, bucket in store.held.buckets.items()} == {0: True, 1: False}
    for index, bucket in store.held.buckets.items():
        assert donated(store, index) == content[index]
        assert bucket.digests() == digests[index]


def test_the_memory_of_what_goes_is_free_then() -> None:
    store, _ = held()
    tensors = {i: [weakref.ref(t) for t in (*b.state, b.gradients)] for i, b in store.held.buckets.items()}
    room_for(store, needed={1}, expected={0, 1})
    gc.collect()
    alive = {index: [tensor() is not None for tensor in each] for index, each in tensors.items()}
    assert alive == {0: [False] * 4, 1: [True] * 3 + [False], 2: [False] * 4, 3: [False] * 4}
    assert not store.held.buckets[1].gradients.any()


def test_the_pages_of_what_is_on_the_disk_are_not_in_memory() -> None:
    store, content = held(1)
    room_for(store, needed=set(), expected={0})
    at = store.held.buckets[0].parameters.data_ptr()
    parts = re.split(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (mapped,) = (m for a, b, m in zip(*(parts[n::3] for n in (1, 2, 3)), strict=True) if int(a, 16) <= at < int(b, 16))
    assert re.search(r"^Rss: +0 kB$", mapped, re.MULTILINE)
    assert donated(store, 0) == content[0]


def test_state_on_a_device_goes_to_the_hosts_memory_as_far_as_that_has_room() -> None:
    """A device without memory stands for one: copies from there have no content."""
    store, _ = held()
    on_device = {}
    for index, bucket in store.held.buckets.items():
        on_device[index] = bucket.set_aside(lambda tensor: tensor.to(META))
        on_device[index].is_aside = False
    store.replace(HeldState(STEP, on_device))

    def away(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtfm.node.state.making_room._in_host", away)
        patch.setattr("dtfm.node.state.making_room._on_disk", lambda _: away)
        found = room_for(store, needed=set(), expected={0, 1, 2, 3}, host_bytes=2 * SIZE + 1)
    assert found == {Aside.HOST: 2 * SIZE, Aside.DISK: 2 * SIZE}


def test_state_that_is_in_the_hosts_memory_stays_there_if_a_device_is_what_is_short() -> None:
    store, content = held()
    assert room_for(store, needed={1}, expected={0, 1}, host_bytes=0) == dict.fromkeys(Aside, 0)
    assert donated(store, 0) == content[0]
    assert {*store.held.buckets} == {0, 1}


def test_who_is_reading_asks_again_and_goes_on_from_there() -> None:
    store, content = held()
    pieces = store.donate(StateRequest(step=STEP, bucket=0))[1]
    other = store.donate(StateRequest(step=STEP, bucket=1))[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtfm.node.state.images.PIECE_BYTES", 1000)
        patch.setattr("dtfm.node.state.images.STATE_CHUNK_BYTES", 1000)
        begun = b"".join(islice(pieces, 3))
        room_for(store, needed={1}, expected={0, 1})
        with pytest.raises(LookupError, match="NOT_HELD: bucket 0 has changed meanwhile"):
            next(pieces)
        assert begun + donated(store, 0, len(begun)) == content[0]
        assert b"".join(other) == content[1]  # this one did not move


def test_state_comes_back_from_where_it_was_moved() -> None:
    store, content = held(momentum=True)
    room_for(store, needed=set(), expected={0})
    aside = store.held.buckets[0]
    back = aside.placed(HOST, HOST)
    assert (back.is_aside, bytes(back.read())) == (False, content[0])
    for tensor, kept in zip((*back.state, *back.shared), (*aside.state, *aside.shared), strict=True):
        assert tensor.data_ptr() != kept.data_ptr()
    assert back.placed(HOST, HOST) is back


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    def full(_: int) -> BinaryIO:
        raise OSError(errno.ENOSPC, "No space left on device")

    store, content = held()
    with pytest.raises(OSError, match="No space left"):
        room_for(store, needed=set(), expected={0, 1, 2, 3}, scratch=full)
    assert {index: donated(store, index) for index in content} == content
    disk = Disk(tmp_path, "me")
    moved = room_for(store, needed=set(), expected={0, 1, 2, 3}, scratch=disk.scratch)
    assert moved[Aside.DISK] == 4 * SIZE
    assert {index: donated(store, index) for index in content} == content
    assert not [*tmp_path.iterdir()]  # its files have no names
