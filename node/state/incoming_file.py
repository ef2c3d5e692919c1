"""A file of a snapshot that comes from other nodes, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from blake3 import blake3

from dtfm.node.data.storage import NewFile
from dtfm.node.state.snapshot_files import Loading
from dtfm.protos.control_pb2 import Part


class IncomingFile:
    """``part``'s file on its way to this node's disk and, with ``loading``, into a bucket; then it need not stay on the disk.

    ``new_file`` and ``loading`` make a fresh target, also each time that the file comes again. ``done`` is called when it is
    here, whole and sound. `take` and `finish` are what `Wanted` needs.
    """

    def __init__(
        self,
        part: Part,
        new_file: Callable[[], NewFile],
        done: Callable[[Part], object] = lambda _: None,
        *,
        loading: Callable[[], Loading] | None = None,
    ) -> None:
        self.part = part
        self._new_file = new_file
        self._done = done
        self._new_loading = loading
        self._digest = blake3()
        self._file: NewFile | None = None
        self._loading: Loading | None = None

    def take(self, piece: memoryview, offset: int) -> None:
        """The next piece, or the first one again, from which the rest follows. In a thread. Raises OSError."""
        if offset == 0:
            self.discard()
            self._digest.reset()
            self._loading = self._new_loading() if self._new_loading is not None else None
            self._on_disk(self._open)
        self._digest.update(piece)
        if self._loading is not None:
            self._loading.take(piece)
        if (file := self._file) is not None:
            self._on_disk(lambda: file.write(piece))

    async def finish(self) -> str:
        """As `Wanted.finish`. Raises OSError if it cannot be kept, and ValueError if it is of another model than the bucket's."""
        if self._digest.digest() != self.part.digest:
            return "its file is damaged (its BLAKE3 differs)"
        await asyncio.to_thread(self._finish)
        self._done(self.part)
        return ""

    def discard(self) -> None:
        """Removes what is on the disk, unless it is finished."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _finish(self) -> None:
        if self._loading is not None:
            self._loading.finish()
        if (file := self._file) is not None:
            self._on_disk(file.finish)

    def _open(self) -> None:
        self._file = self._new_file()

    def _on_disk(self, work: Callable[[], object]) -> None:
        """What is in memory need not be on the disk too."""
        try:
            work()
        except OSError:
            if self._new_loading is None:
                raise
            self.discard()
