"""Frames with every kind of nonsense harm nobody. Each raises only a FrameError, nothing is kept, and an honest peer's tensors
arrive among them."""

from __future__ import annotations

import contextlib
import random
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.placement import placement_of
from dtfm.node.transport.frame_validation import Expectations, TensorSizes
from dtfm.node.transport.receiver import Arrival, Receiver
from dtfm.protos.frame import HEADER_BYTES, MAX_FRAME_BYTES, FrameError, Header, Kind, frames
from dtfm.scheduler.model.plan import Stage, from_routes

GENERATION, ELEMENTS, BUCKET = 5, 16, 64
PLAN = from_routes(
    GENERATION,
    [Stage((0, 1), ("a1", "a2"), ()), Stage((1, 2), ("me", "other"), ()), Stage((2, 3), ("z",), ())],
    [(("a1", "me", "z"), 2), (("a2", "other", "z"), 2)],
)
LIARS = ("a2", "z", "other", "me", "stranger", "")
EDGES = (0, 1, 2, 3, 5, 63, 64, 65, 255, (1 << 16) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 64) - 1)


def tensor(step: int, index: int = 0) -> Header:
    return Header(Kind.ACTIVATION, 0, 1, GENERATION, step, index, 0, ELEMENTS, 4 * ELEMENTS)


def frame_of(header: Header, payload: bytes) -> bytes:
    return next(frames(replace(header, offset=0, total=len(payload)), memoryview(payload)))


def nonsense(draw: random.Random, step: int) -> bytes:
    """One frame: random bytes; or a sound one, damaged; or one of the right form, whose fields are not."""
    what = draw.random()
    if what < 0.1:
        return draw.randbytes(draw.choice((0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, 200)))
    kind = draw.choice(list(Kind))
    header = Header(kind, 0, 1, GENERATION, step, draw.randrange(4), draw.randrange(4), ELEMENTS, 4 * ELEMENTS)
    sound = frame_of(header, draw.randbytes(4 * ELEMENTS))
    if what < 0.4:
        damaged = bytearray(sound)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        return bytes(damaged)
    if what < 0.5:
        return sound[: draw.randrange(len(sound))] if draw.random() < 0.5 else sound + draw.randbytes(7)
    fields: dict[str, Any] = {
        name: draw.choice(EDGES) & limit
        for name, limit in (
            ("codec", 0xFF),
            ("dtype", 0xFF),
            ("generation", (1 << 64) - 1),
            ("step", 0xFFFFFFFF),
            ("index", 0xFFFFFFFF),
            ("part", 0xFFFFFFFF),
            ("elements", (1 << 64) - 1),
        )
        if draw.random() < 0.25
    }
    return frame_of(replace(header, **fields), draw.randbytes(draw.choice((0, 1, 4 * ELEMENTS, 4 * ELEMENTS, 300))))


def bombard(count: int, seed: int) -> None:
    draw = random.Random(seed)
    placement = placement_of(PLAN, "me", 2, [BucketSpec(1, (1,), ())])
    assert placement is not None
    expect = Expectations(placement, TensorSizes(ELEMENTS, ELEMENTS, {1: BUCKET}, torch.float32, torch.float32))
    arrived: list[Arrival] = []
    step = 1
    receiver = Receiver(expect, 0, arrived.append)
    for number in range(count):
        with contextlib.suppress(FrameError):
            receiver.take(draw.choice(LIARS), nonsense(draw, step))
        if number % 500 == 499:
            payload = struct.pack("<I", step) * ELEMENTS
            receiver.take("a1", frame_of(tensor(step), payload))
            assert arrived[-1].source == "a1"
            assert bytes(arrived[-1].encoded) == payload
            assert len(receiver._partial) + len(receiver._done) < 50
            # Peers may send the tensors that the plan names, and no others.
            assert all(a.header.generation == GENERATION and a.header.step in (step, step + 1) for a in arrived)
            assert {(a.source, a.header.kind) for a in arrived} <= {
                ("a1", Kind.ACTIVATION),
                ("z", Kind.GRADIENT),
                ("other", Kind.REDUCE),
                ("other", Kind.GATHER),
            }
            assert len(arrived) < 50
            arrived.clear()
            receiver.advance(step)
            step += 1


def test_ten_thousand_frames() -> None:
    bombard(10_000, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_million_frames() -> None:
    for seed in range(10):
        bombard(1_000_000, seed)


def test_a_frame_that_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match="TOO_LARGE"):
        Receiver(Expectations(None, None), 0, lambda _: None).take("a1", bytes(MAX_FRAME_BYTES + 1))  # type: ignore[arg-type]
