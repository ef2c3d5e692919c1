"""A tensor's encoded bytes, put together from its frames."""

from __future__ import annotations

from dataclasses import replace

from dtfm.protos.frame import FrameError, FrameProblem, Header


class Assembly:
    """Takes the frames of one tensor in order, copying each once to where it belongs: a bytearray that grows frame by frame
    costs half as much CPU again as all the rest of a stream.

    ``memory`` (uint8, as long as the tensor) is what gets filled. Take it only for a header whose ``total`` was found to be what
    may come.
    """

    def __init__(self, first: Header, memory: memoryview) -> None:
        assert len(memory) == first.total
        self.header = replace(first, offset=0)
        self._bytes = memory
        self._next = 0
        self._whole = False

    @property
    def encoded(self) -> memoryview:
        """The whole tensor's bytes (uint8, ``header.total`` long)."""
        assert self._whole, f"{self._next} of {self.header.total} bytes are there"
        return self._bytes

    def take(self, header: Header, payload: memoryview) -> bool:
        """One parsed frame (frame.parse); whether the tensor is whole now. Raises FrameError for a frame of another tensor
        (UNEXPECTED), one that was there before (DUPLICATE) and one that came too early (UNEXPECTED)."""
        name = f"{header.kind.name} {header.index}"
        if replace(header, offset=0) != self.header:
            raise FrameError(FrameProblem.UNEXPECTED, f"{name} began otherwise")
        if self._whole or header.offset < self._next:
            raise FrameError(FrameProblem.DUPLICATE, f"offset {header.offset} of {name}; {self._next} bytes are there")
        if header.offset > self._next:
            raise FrameError(FrameProblem.UNEXPECTED, f"offset {header.offset} of {name}; {self._next} is next")
        self._next += len(payload)
        self._bytes[header.offset : self._next] = payload
        self._whole = self._next == header.total
        return self._whole
