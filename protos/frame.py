"""One frame of a raw tensor stream: a fixed header and a chunk of a tensor's encoded bytes. How a tensor is cut into frames, and
assembled from them.

A tensor is sent as one or more frames whose headers differ only in ``offset``. Nothing in a header is trusted: the plan says
which frames may arrive, and any other is refused with a FrameProblem. What happens on the way is left to TLS.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

CHUNK_BYTES = 1 << 20
"""Largest payload of a frame."""
STATE_CHUNK_BYTES = 1 << 16
"""Largest payload of a frame of state. It is smaller so that a frame crosses a slow link well within a lease."""
_MAGIC = b"dtf2"
_HEADER = struct.Struct("<4sBBBQIIIQQQ")
HEADER_BYTES = _HEADER.size
MAX_FRAME_BYTES = HEADER_BYTES + CHUNK_BYTES


class Kind(enum.IntEnum):
    """What a tensor is for, and so the meaning of its frames' ``index`` and ``part``."""

    ACTIVATION = 1
    """Output of a stage. index: micro-batch."""
    GRADIENT = 2
    """Loss gradient of a stage's input. index: micro-batch."""
    EVALUATION = 3
    """Output of a stage for held-out samples. index: micro-batch."""
    REDUCE = 4
    """One replica's gradients of one piece of a shard, sent to its owner. index: bucket, part: piece."""
    GATHER = 5
    """The sum of the gradients of one piece of a shard, sent by its owner. index: bucket, part: piece."""
    STATE = 6
    """Parameters and optimizer state. index: bucket, part: the newest step that the sender has applied."""
    UPDATE = 7
    """Summed gradients of a step, or an exchange's sum, for which the sender votes, to its standbys. After the gradients come
    Muon's updates. index: bucket."""
    COMMITTED = 8
    """The step's global gradient norm (float64) with which the sender has applied it. index: bucket, part: as in STATE."""
    ORTHOGONAL = 9
    """A piece of Muon's update of a matrix, sent by the matrix's owner. index: bucket, part: piece."""
    LOOK = 10
    """Output of a stage for held-out samples under an outer step that an exchange may choose. index: micro-batch, part: the outer
    step's place among those."""


class FrameProblem(enum.Enum):
    """Why a frame was refused."""

    TRUNCATED = "shorter than its header, or than the header says"
    TOO_LARGE = "larger than a frame may be"
    MALFORMED = "not a frame of this protocol"
    STALE = "from a generation or step that is over"
    UNKNOWN_GENERATION = "from a generation that this node does not have"
    UNEXPECTED = "not in the plan for this peer"
    DUPLICATE = "already received"


class FrameError(ValueError):
    """A frame was refused: ``problem`` is the reason for programs, the message that for people."""

    def __init__(self, problem: FrameProblem, sentence: str) -> None:
        super().__init__(f"{problem.name}: {sentence}")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's header.

    ``elements`` and ``dtype`` describe the whole tensor, ``total`` is its encoded length in bytes, and ``offset`` is
    the position of this frame's payload in it. The fields are in the order of the wire.
    """

    kind: Kind
    codec: int
    dtype: int
    generation: int
    step: int
    index: int
    part: int
    elements: int
    total: int
    offset: int = 0


_FIELDS = attrgetter(*Header.__slots__)


def frames(header: Header, encoded: memoryview) -> Iterator[bytes]:
    """Yields the frames of ``encoded`` (uint8, contiguous) in order, each at most MAX_FRAME_BYTES long.

    ``encoded`` is the tensor from ``header.offset`` on, to its end or for a whole number of frames.
    """
    chunk = _chunk_bytes(header.kind)
    begin, end = header.offset, header.offset + len(encoded)
    assert begin % chunk == 0, (begin, chunk)
    assert end == header.total or (end < header.total and end % chunk == 0), (end, header.total)
    *of_tensor, _ = _FIELDS(header)
    for offset in range(begin, max(end, begin + 1), chunk):
        payload = encoded[offset - begin : offset - begin + chunk]
        yield b"".join((_HEADER.pack(_MAGIC, *of_tensor, offset), payload))


def parse(frame: bytes) -> tuple[Header, memoryview]:
    """The header and payload of a received frame. Raises FrameError."""
    if len(frame) < HEADER_BYTES:
        raise FrameError(FrameProblem.TRUNCATED, f"{len(frame)} bytes; the header alone has {HEADER_BYTES}")
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError(FrameProblem.TOO_LARGE, f"{len(frame)} bytes; a frame has at most {MAX_FRAME_BYTES}")
    magic, kind, codec, dtype, generation, step, index, part, elements, total, offset = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise FrameError(FrameProblem.MALFORMED, f"starts with {magic!r} instead of {_MAGIC!r}")
    try:
        kind = Kind(kind)
    except ValueError:
        raise FrameError(FrameProblem.MALFORMED, f"kind {kind} does not exist") from None
    payload, chunk = memoryview(frame)[HEADER_BYTES:], _chunk_bytes(kind)
    if offset % chunk or offset >= max(total, 1):
        raise FrameError(FrameProblem.MALFORMED, f"offset {offset} in a tensor of {total} bytes")
    if len(payload) != min(chunk, total - offset):
        raise FrameError(
            FrameProblem.TRUNCATED,
            f"{len(payload)} bytes of payload instead of {min(chunk, total - offset)}",
        )
    return Header(kind, codec, dtype, generation, step, index, part, elements, total, offset), payload


class Assembly:
    """Assembles a tensor: takes its frames in order, and copies each once into place.

    ``memory`` (uint8, as long as the tensor) is filled. Construct an Assembly only after checking that ``first.total`` is an
    expected size. A growing bytearray would cost half as much CPU again as the rest of a stream.
    """

    def __init__(self, first: Header, memory: memoryview) -> None:
        assert len(memory) == first.total
        self.header = replace(first, offset=0)
        self._bytes = memory
        self._next = 0
        self._whole = False

    @property
    def encoded(self) -> memoryview:
        """The complete tensor's bytes (uint8, ``header.total`` of them)."""
        assert self._whole, f"only {self._next} of {self.header.total} bytes have arrived"
        return self._bytes

    @property
    def received(self) -> int:
        """The number of bytes that have arrived."""
        return self._next

    def take(self, header: Header, payload: memoryview) -> bool:
        """Takes one parsed frame (`parse`) and returns whether the tensor is now complete.

        Raises FrameError: UNEXPECTED for a frame of another tensor or one that comes too early, DUPLICATE for a repeated one.
        """
        name = f"{header.kind.name} {header.index}"
        if replace(header, offset=0) != self.header:
            raise FrameError(FrameProblem.UNEXPECTED, f"{name} began with another header")
        if self._whole or header.offset < self._next:
            raise FrameError(
                FrameProblem.DUPLICATE, f"offset {header.offset} of {name}; {self._next} bytes have arrived"
            )
        if header.offset > self._next:
            raise FrameError(FrameProblem.UNEXPECTED, f"offset {header.offset} of {name}; {self._next} is next")
        self._next += len(payload)
        self._bytes[header.offset : self._next] = payload
        self._whole = self._next == header.total
        return self._whole


def _chunk_bytes(kind: Kind) -> int:
    return STATE_CHUNK_BYTES if kind is Kind.STATE else CHUNK_BYTES
