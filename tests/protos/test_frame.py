"""A frame arrives unchanged or is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from dtfm.protos.frame import (
    CHUNK_BYTES,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    STATE_CHUNK_BYTES,
    FrameError,
    FrameProblem,
    Header,
    Kind,
    frames,
    parse,
)

headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    codec=st.integers(0, 255),
    dtype=st.integers(0, 255),
    generation=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    index=st.integers(0, 2**32 - 1),
    part=st.integers(0, 2**32 - 1),
    elements=st.integers(0, 2**64 - 1),
    total=st.just(0),
)


def sent(payload: bytes, header: Header | None = None) -> list[bytes]:
    header = header or Header(Kind.ACTIVATION, 0, 1, 3, 7, 2, 0, len(payload) // 4, len(payload))
    return list(frames(header, memoryview(payload)))


def problem_of(frame: bytes) -> FrameProblem:
    with pytest.raises(FrameError) as caught:
        parse(frame)
    return caught.value.problem


@given(headers, st.binary(max_size=300))
def test_every_header_and_payload_is_parsed_back(header: Header, payload: bytes) -> None:
    header = replace(header, total=len(payload))
    (frame,) = sent(payload, header)
    assert parse(frame)[0] == header
    assert bytes(parse(frame)[1]) == payload


def test_a_large_tensor_is_sent_in_order_in_frames_of_bounded_length() -> None:
    payload = bytes(range(256)) * (3 * CHUNK_BYTES // 256) + b"tail"
    pieces = sent(payload)
    assert [len(p) for p in pieces] == [MAX_FRAME_BYTES] * 3 + [HEADER_BYTES + 4]
    assert b"".join(bytes(parse(p)[1]) for p in pieces) == payload
    assert [parse(p)[0].offset for p in pieces] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES]


def test_frames_of_state_cross_a_slow_link_within_a_lease() -> None:
    payload = bytes(2 * STATE_CHUNK_BYTES + 4)
    pieces = sent(payload, Header(Kind.STATE, 0, 0, 3, 7, 2, 0, len(payload), len(payload)))
    assert [len(parse(p)[1]) for p in pieces] == [STATE_CHUNK_BYTES, STATE_CHUNK_BYTES, 4]
    assert STATE_CHUNK_BYTES <= 50e3 * 2  # bytes per second, seconds


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(FrameError):
        parse(noise)


def test_refusals_name_the_problem() -> None:
    (frame,) = sent(b"x" * 100)
    assert problem_of(frame[: HEADER_BYTES - 1]) is FrameProblem.TRUNCATED
    assert problem_of(frame[:-1]) is FrameProblem.TRUNCATED
    assert problem_of(frame + b"y") is FrameProblem.TRUNCATED
    assert problem_of(bytes(MAX_FRAME_BYTES + 1)) is FrameProblem.TOO_LARGE
    assert problem_of(b"HTTP" + frame[4:]) is FrameProblem.MALFORMED
