"""Images of buckets as of a step: read piece by piece while training goes on, by donations, standbys and snapshots alike."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import BinaryIO
from weakref import WeakSet

from dtfm.node.data.shared.storage import PIECE_BYTES
from dtfm.node.host.cuda_streams import after
from dtfm.node.host.device import free_memory
from dtfm.node.host.work import WORK
from dtfm.node.model.bucket import HOST, Bucket, bucket_bytes
from dtfm.protos.frame import STATE_CHUNK_BYTES

FREE_MEMORY_FRACTION = 0.5
"""The largest fraction of the host's free memory for copies that have still to be read."""

PIECES_BYTES = 64 << 20
"""Most bytes of pieces that are handed out at a time, whoever asks, as long as these are more than a frame for each."""

Scratch = Callable[[int], BinaryIO]
"""Returns a file for so many bytes. Raises OSError if there is no room."""


def no_scratch(_: int) -> BinaryIO:
    raise OSError("it keeps none")


class Images:
    """The images of this process.

    Readings of a bucket in the same state share an image. While they keep up with training, each has a piece in memory beside
    the state, and training waits for none. Just before the state changes, the unread rest is copied once: to memory,
    as far as that has room (FREE_MEMORY_FRACTION), else to a file of ``scratch``. If neither has room, or if no reading wants the
    image longer than the state lasts, the rest is lost, and training goes on.
    """

    def __init__(self, scratch: Scratch = no_scratch) -> None:
        self._scratch = scratch
        self._lock = Lock()
        self._images: WeakSet[_Image] = WeakSet()  # alive as long as somebody reads them
        self._readings: WeakSet[Reading] = WeakSet()

    def read(
        self, bucket: Bucket, offset: int = 0, end: int = 0, *, outlasts: bool = True, shared: bool = False
    ) -> Reading:
        """Reads the bucket's state from byte ``offset`` on, or the part that islands have ``shared``, up to byte ``end`` (0: to
        its end). Not while it changes. Unless it ``outlasts`` the state, the reading is over with the next change."""
        with self._lock:
            alike = (image for image in self._images if image.bucket is bucket and image.shared is shared)
            image = next(alike, None) or _Image(bucket, shared)
            self._images.add(image)
            reading = Reading(self, image, offset, outlasts, end)
            image.readings.add(reading)
            self._readings.add(reading)
            return reading

    def keep(self, *, shared: bool = True, of: Bucket | None = None) -> None:
        """To be called before the state changes, with ``shared`` if its shared part does, by the thread that changes it. ``of``:
        of this bucket alone. Raises nothing."""
        with self._lock:
            changing = (
                image for image in self._images if (shared or not image.shared) and (of is None or image.bucket is of)
            )
            images = sorted(changing, key=lambda image: image.index)
        room = int(FREE_MEMORY_FRACTION * free_memory(HOST)) if images else 0
        for image in images:
            room -= image.keep(room, self._scratch)

    @property
    def piece_bytes(self) -> int:
        """What a reading may hand out at a time: whole frames."""
        most = min(PIECE_BYTES, PIECES_BYTES // max(1, len(self._readings)))
        return max(STATE_CHUNK_BYTES, most - most % STATE_CHUNK_BYTES)


class Reading:
    """An iterator over the pieces of a bucket's state: at least one, which may be empty. For one thread at a time.

    Raises LookupError if the state has changed since, and OSError if there was no room to keep it.
    """

    def __init__(self, images: Images, image: _Image, offset: int, outlasts: bool, end: int = 0) -> None:
        self._images, self._image = images, image
        self.bucket = image.index
        self.at = min(offset, image.end)
        """Byte of the state with which the next piece begins."""
        self._end = max(self.at, min(end or image.end, image.end))
        self.size_bytes = self._end - self.at
        self.outlasts = outlasts
        self._begun = False

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> memoryview:
        begin, end = self.at, min(self.at + self._images.piece_bytes, self._end)
        if begin == end and self._begun:
            raise StopIteration
        piece = self._image.read(begin, end)
        self.at, self._begun = end, True
        return piece


class _Image:
    """One bucket's state: in the bucket until that changes, then in the copy. Then the bucket is let go: the node may
    have another stage by now."""

    def __init__(self, bucket: Bucket, shared: bool) -> None:
        self.index = bucket.spec.index
        self.bucket: Bucket | None = bucket
        self.shared = shared
        self.end = bucket_bytes(bucket.spec, bucket.parameters.dtype, shared=shared)
        self.readings: WeakSet[Reading] = WeakSet()
        self._lock = Lock()
        # To read it without waiting for present computations.
        self._ready = after(bucket.home)
        self._kept: memoryview | BinaryIO = memoryview(b"")
        self._kept_from = 0
        self._lost: Exception | None = None

    def read(self, begin: int, end: int) -> memoryview:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self.bucket is not None:
                with self._ready():
                    return self.bucket.read(begin, end, shared=self.shared)
            if isinstance(self._kept, memoryview):
                return self._kept[begin - self._kept_from : end - self._kept_from]
            self._kept.seek(begin - self._kept_from)
            return memoryview(self._kept.read(end - begin))

    def keep(self, room: int, scratch: Scratch) -> int:
        """Copies the part that somebody has not read yet, once: to memory if ``room`` bytes are enough. Returns the
        bytes of that."""
        with self._lock:
            bucket, self.bucket = self.bucket, None
            wanted = [reading.at for reading in self.readings if reading.outlasts]
            if bucket is None:
                return 0
            if not wanted:
                self._lost = LookupError(f"NOT_HELD: bucket {self.index} has changed meanwhile")
                return 0
            self._kept_from = min(wanted)
            try:
                return self._copy(bucket, room, scratch)
            except Exception as error:  # out of memory, for one
                self._lost = error
                return 0

    def _copy(self, bucket: Bucket, room: int, scratch: Scratch) -> int:
        left = self.end - self._kept_from
        if left <= room:
            self._kept = bucket.read(self._kept_from, self.end, shared=self.shared)
            return left
        try:
            self._kept = scratch(left)
            for begin in range(self._kept_from, self.end, PIECE_BYTES):
                self._kept.write(bucket.read(begin, min(begin + PIECE_BYTES, self.end), shared=self.shared))
                WORK.did()
        except OSError as error:
            raise OSError(
                f"the state of bucket {self.index} was about to change before it was read, and {left} bytes of it fit neither "
                f"in memory, of which {max(0, room)} bytes may be used, nor on this node's disk ({error}); give the node more "
                "memory or --snapshots on a larger disk, or write snapshots to a faster place"
            ) from error
        return 0
