"""Assembles a tensor's encoded bytes from its frames."""

from __future__ import annotations

from dataclasses import replace

from dtfm.protos.frame import FrameError, FrameProblem, Header


class Assembly:
    """Takes the frames of one tensor in order and copies each once into place.

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
        """Takes one parsed frame (frame.parse) and returns whether the tensor is now complete.

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
