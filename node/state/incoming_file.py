"""A file of a snapshot that comes from other nodes, piece by piece."""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3

from dtfm.node.data.storage import NewFile
from dtfm.node.model.bucket import Bucket
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import Loading
from dtfm.protos.control_pb2 import Part


def named(step: int, part: Part) -> str:
    return f"snapshot of step {step}, bucket {part.bucket}"


class IncomingFile:
    """``part``'s file of the snapshot of ``step`` on its way to this node's ``disk`` and, if one is given, into ``bucket``; then
    it need not stay on the disk.

    ``done`` is called when it is here, whole and sound. `take` and `finish` are what `Wanted` needs.
    """

    def __init__(
        self,
        disk: Disk,
        step: int,
        part: Part,
        *,
        done: Callable[[Part], object] = lambda _: None,
        bucket: Bucket | None = None,
    ) -> None:
        self.part = part
        self._disk, self._step, self._bucket = disk, step, bucket
        self._done = done
        self._digest = blake3()
        self._file: NewFile | None = None
        self._loading: Loading | None = None

    def take(self, piece: memoryview, offset: int) -> None:
        """The next piece, or the first one again, from which the rest follows. In a thread. Raises OSError."""
        if offset == 0:
            self.discard()
            self._digest.reset()
            self._loading = Loading(self._bucket, named(self._step, self.part)) if self._bucket is not None else None
            self._on_disk(self._open)
        self._digest.update(piece)
        if self._loading is not None:
            self._loading.take(piece)
        if (file := self._file) is not None:
            self._on_disk(lambda: file.write(piece))

    def finish(self) -> str:
        """As `Wanted.finish`. Raises OSError if it cannot be kept, and ValueError if it is of another model than the bucket's."""
        if self._digest.digest() != self.part.digest:
            return "its file is damaged (its BLAKE3 differs)"
        if self._loading is not None:
            self._loading.finish()
        if (file := self._file) is not None:
            self._on_disk(file.finish)
        self._done(self.part)
        return ""

    def discard(self) -> None:
        """Removes what is on the disk, unless it is finished."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _open(self) -> None:
        self._file = self._disk.new_file(self._step, self.part.bucket, self.part.size_bytes)

    def _on_disk(self, work: Callable[[], object]) -> None:
        """What is in memory need not be on the disk too."""
        try:
            work()
        except OSError:
            if self._bucket is None:
                raise
            self.discard()
