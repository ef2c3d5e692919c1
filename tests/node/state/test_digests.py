"""What a node says of the state that it holds: `state/digests.py`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from blake3 import blake3

from dtfm.node.model.bucket import HOST, Bucket, BucketSpec
from dtfm.node.state.digests import StateDigests


@pytest.fixture
def digests() -> Iterator[StateDigests]:
    made = StateDigests()
    yield made
    made.close()


def bucket(index: int, value: float = 1.0) -> Bucket:
    made = Bucket(BucketSpec(index, (index,), (("weight", (4,)),)), HOST, torch.float32)
    made.parameters.fill_(value)
    return made


def test_each_bucket_is_named_with_its_digest_and_who_gave_it(digests: StateDigests) -> None:
    mine, given = bucket(0), bucket(1)
    given.donors = ("a", "b")
    digests.begin(3, [mine, given])
    told = digests.of([mine, given])
    assert [(state.bucket, state.digest, tuple(state.donors)) for state in told] == [
        (0, mine.digests()[0], ()),
        (1, given.digests()[0], ("a", "b")),
    ]
    assert digests.of_stage({0: mine, 1: given}) == blake3(mine.digests()[0] + given.digests()[0]).digest()


def test_a_digest_is_taken_once_a_step(digests: StateDigests, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Bucket] = []
    digests_of = Bucket.digests

    def counted(self: Bucket) -> tuple[bytes, bytes]:
        taken.append(self)
        return digests_of(self)

    monkeypatch.setattr(Bucket, "digests", counted)
    mine, other = bucket(0), bucket(0, 2.0)
    digests.begin(3, [mine])
    before = digests.of_stage({0: mine})
    digests.begin(3, [mine])
    assert digests.of_stage({0: mine}) == before
    digests.begin(3, [other])
    assert digests.of_stage({0: other}) != before
    mine.parameters.fill_(3.0)
    digests.begin(4, [mine])
    assert digests.of_stage({0: mine}) != before
    assert taken == [mine, other, mine]


def test_what_is_not_held_any_more_is_freed(digests: StateDigests) -> None:
    mine = bucket(0)
    digests.begin(3, [mine])
    digests.of([mine])
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is None
