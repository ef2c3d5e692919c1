"""A bucket's state as bytes."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from dtfm.node.model.bucket import HOST, LOADED_AT_ONCE, STATE_TENSORS, Bucket, BucketSpec, bucket_bytes

CPU = torch.device("cpu")
SPEC = BucketSpec(2, (2,), (("a.weight", (3, 4)), ("a.bias", (3,)), ("scale", ())))


def bucket_with(seed: int, dtype: torch.dtype = torch.float32) -> Bucket:
    bucket = Bucket(SPEC, CPU, dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in bucket.state:
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return bucket


def test_views_share_the_flat_memory() -> None:
    bucket = bucket_with(1)
    views = bucket.views(bucket.parameters)
    assert {name: tuple(view.shape) for name, view in views.items()} == dict(SPEC.parameters)
    views["scale"].fill_(9)
    assert bucket.parameters[-1] == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_bytes_of_the_state_can_be_copied(dtype: torch.dtype) -> None:
    bucket = bucket_with(1, dtype)
    state = b"".join(tensor.numpy().tobytes() for tensor in bucket.state)
    copied = bucket.read()
    bucket.moments[0].fill_(7)
    assert copied == state
    assert len(state) == bucket_bytes(SPEC, dtype) == 3 * 16 * dtype.itemsize
    bucket = bucket_with(1, dtype)
    for begin, end in itertools.combinations(range(0, len(state) + 1, 8), 2):
        assert bucket.read(begin, end) == state[begin:end]


def test_a_matrix_of_muons_has_no_part_in_the_second_moment() -> None:
    spec = replace(SPEC, orthogonal=frozenset({"a.weight"}), has_momentum=True)
    bucket, other = Bucket(spec, CPU, torch.float32), Bucket(spec, CPU, torch.float32)
    for number, tensor in enumerate(bucket.state):
        tensor.copy_(torch.arange(len(tensor)) + 100 * number)
    assert [len(tensor) for tensor in bucket.state] == [16, 16, 4, 16]
    assert {name: view.shape for name, view in bucket.matrices(bucket.updates).items()} == {"a.weight": (3, 4)}
    assert [*bucket.without_matrices(bucket.moments[1])] == ["a.bias", "scale"]
    content = bytes(bucket.read())
    assert len(content) == bucket_bytes(spec, torch.float32)
    for begin in range(0, len(content), 28):
        other.load(content[begin : begin + 28], begin)
    assert all(map(torch.equal, other.state, bucket.state))
    other.load(bucket.read(shared=True), shared=True)
    assert len(bucket.read(shared=True)) == bucket_bytes(spec, torch.float32, shared=True)
    assert other.digests() == bucket.digests()


def test_a_digest_tells_of_every_tensor_of_the_state_and_of_their_order() -> None:
    one, digests = bucket_with(1), set()
    digests.add(one.digests()[0])
    for tensor in one.state:
        tensor[3] += 1
        digests.add(one.digests()[0])
        tensor[3] -= 1
    one._moments = one.moments[1], one.moments[0]
    digests.add(one.digests()[0])
    assert len(digests) == 5
    assert bucket_with(1).digests()[0] in digests


@given(cuts=st.lists(st.integers(0, bucket_bytes(SPEC, torch.float32)), max_size=6), shuffled=st.randoms())
def test_state_loads_from_any_pieces_in_any_order(cuts: list[int], shuffled: object) -> None:
    source, target = bucket_with(1), bucket_with(2)
    data = bytes(source.read())
    edges = sorted({0, len(data), *cuts})
    pieces = list(itertools.pairwise(edges))
    shuffled.shuffle(pieces)  # type: ignore[attr-defined]
    for begin, end in pieces:
        target.load(data[begin:end], begin)
    assert target.read() == data


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 193), (192, 1), (180, 16)])
def test_bytes_outside_the_state_are_refused(offset: int, size: int) -> None:
    bucket = bucket_with(1)
    before = bytes(bucket.read())
    with pytest.raises(ValueError, match="bucket 2 has 192 bytes"):
        bucket.load(bytes(size), offset)
    assert bucket.read() == before


def test_a_layer_without_parameters_has_an_empty_bucket() -> None:
    bucket = Bucket(BucketSpec(1, (1,), ()), CPU, torch.float32)
    assert len(bucket.read()) == 0
    bucket.load(b"")
    assert bucket.views(bucket.parameters) == {}


def test_loading_takes_little_memory_beside_the_bucket() -> None:
    bucket = Bucket(BucketSpec(0, (0,), (("w", (1 << 20,)),)), torch.device("cpu"), torch.float32)
    state = bytes(bucket_bytes(bucket.spec, torch.float32))
    tracemalloc.start()
    bucket.load(state)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * LOADED_AT_ONCE < len(state) / STATE_TENSORS


def test_what_lies_in_writable_memory_is_loaded_without_another_copy() -> None:
    bucket = Bucket(BucketSpec(0, (0,), (("w", (1 << 18,)),)), torch.device("cpu"), torch.float32)
    state = bytearray(range(256)) * (bucket_bytes(bucket.spec, torch.float32) // 256)
    tracemalloc.start()
    bucket.load(memoryview(state))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 16
    assert bucket.read() == state


def test_a_copy_of_what_islands_share_has_no_memory_for_moments() -> None:
    bucket = Bucket(replace(SPEC, has_momentum=True), CPU, torch.float32)
    bucket.load(bytes(bucket_bytes(bucket.spec, torch.float32, shared=True)), shared=True)
    new = bucket.for_new_island(at_rest=True).placed(CPU, HOST)
    assert new.read(shared=True) == bytes(2 * 16 * 4)
    assert (bucket._moments, new._moments) == (None, None)


def test_islands_share_all_of_the_state_but_its_moments() -> None:
    spec = replace(SPEC, has_momentum=True)
    mine, theirs = Bucket(spec, CPU, torch.float32), Bucket(spec, CPU, torch.float32)
    theirs.moments[0].fill_(1.0)
    theirs.moments[1].fill_(1.0)
    assert mine.digests()[0] != theirs.digests()[0]
    assert mine.digests()[1] == theirs.digests()[1]
    for shared in theirs.shared:
        before, _ = theirs.digests()[1], shared.fill_(2.0)
        assert theirs.digests()[1] != before
