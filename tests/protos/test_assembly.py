"""Assembling a tensor from its frames: in order, each once, all of one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtfm.protos.frame import CHUNK_BYTES, Assembly, FrameError, FrameProblem, Header, Kind, frames, parse

PAYLOAD = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"tail"
HEADER = Header(Kind.REDUCE, 2, 1, 3, 7, 5, 1, len(PAYLOAD), len(PAYLOAD))
FRAMES = [parse(frame) for frame in frames(HEADER, memoryview(PAYLOAD))]


def begun(with_frames: int) -> Assembly:
    assembly = Assembly(HEADER, memoryview(bytearray(HEADER.total)))
    for header, payload in FRAMES[:with_frames]:
        assembly.take(header, payload)
    return assembly


def test_a_tensor_is_complete_with_its_last_frame() -> None:
    assembly = begun(0)
    assert [assembly.take(*frame) for frame in FRAMES] == [False, False, True]
    assert bytes(assembly.encoded) == PAYLOAD
    assert assembly.header == HEADER


def test_a_tensor_without_bytes_is_one_frame() -> None:
    header = replace(HEADER, total=0, elements=0)
    assembly = Assembly(header, memoryview(bytearray()))
    (frame,) = frames(header, memoryview(b""))
    assert assembly.take(*parse(frame))
    with pytest.raises(FrameError, match="DUPLICATE"):
        assembly.take(*parse(frame))


@pytest.mark.parametrize(
    ("there", "number", "problem"),
    [
        (1, 0, FrameProblem.DUPLICATE),
        (2, 1, FrameProblem.DUPLICATE),
        (3, 2, FrameProblem.DUPLICATE),
        (0, 1, FrameProblem.UNEXPECTED),
        (1, 2, FrameProblem.UNEXPECTED),
    ],
)
def test_repeated_and_early_frames_are_refused(there: int, number: int, problem: FrameProblem) -> None:
    assembly = begun(there)
    with pytest.raises(FrameError) as caught:
        assembly.take(*FRAMES[number])
    assert caught.value.problem is problem


@pytest.mark.parametrize("change", [{"index": 6}, {"codec": 0}, {"step": 8}, {"total": HEADER.total + 1}])
def test_a_frame_of_another_tensor_is_refused_without_harm(change: dict[str, Any]) -> None:
    assembly = begun(1)
    header, payload = FRAMES[1]
    with pytest.raises(FrameError, match=r"UNEXPECTED: REDUCE \d began with another header"):
        assembly.take(replace(header, **change), payload)
    assert [assembly.take(*frame) for frame in FRAMES[1:]] == [False, True]
    assert bytes(assembly.encoded) == PAYLOAD
