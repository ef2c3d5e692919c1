"""The files of a snapshot: a bucket as a safetensors file and back, piece by piece, written to and read from any fsspec URL.

A bucket's file has the parameters under their state-dict names, then the two moments as flat tensors: a header, and after it the
bytes of `Bucket.read`. In a checkpoint it may have the parameters alone. A checkpoint is whole when its manifest.json exists,
which the coordinator writes last.
"""

from __future__ import annotations

import json
import math
import operator
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from dtfm.node.data.dataset import Data
from dtfm.node.data.storage import read_pieces, write
from dtfm.node.model.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.model import Model
from dtfm.protos.bucket_layout import LENGTH_BYTES, MOMENTS, MOST_HEADER_BYTES, layout_digest
from dtfm.protos.checkpoint_names import MANIFEST as MANIFEST, bucket_of

FORMAT = 1
_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
"""By the state's dtype, its name in a file."""
_MOST_MANIFEST_BYTES = 1 << 24

MOST_PROBLEM_CHARACTERS = 1000


class CheckpointDamaged(ValueError):
    """The checkpoint is not as it was written, or not what the coordinator means: an older one may be."""


def file_name(bucket: int) -> str:
    """In a snapshot on this node's own disk."""
    return f"bucket-{bucket:05d}.safetensors"


def in_one_sentence(error: Exception) -> str:
    """As the coordinator is told of it."""
    return f"{type(error).__name__}: {error}"[:MOST_PROBLEM_CHARACTERS]


def file_header(spec: BucketSpec, dtype: torch.dtype, *, weights: bool = False) -> bytes:
    """What a bucket's file begins with, before the state, or before the ``weights`` alone. The format is described in the README
    of safetensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in (dict(spec.parameters) if weights else _tensors(spec)).items():
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def file_layout(spec: BucketSpec, dtype: torch.dtype) -> bytes:
    """The digest of the layout of a bucket's file."""
    return layout_digest((name, _DTYPES[dtype], shape) for name, shape in _tensors(spec).items())


def most_bytes(spec: BucketSpec, dtype: torch.dtype) -> int:
    """An upper bound on the size of the bucket's file."""
    return bucket_bytes(spec, dtype) + MOST_HEADER_BYTES


class Loading:
    """A bucket's file, piece by piece from its first byte on, on its way into ``bucket``, which keeps its device.

    What it brings counts only when `finish` has raised nothing, and when the digest of the whole is as it should be, which is for
    the caller to see: until then the bucket must not be used.
    """

    def __init__(self, bucket: Bucket, where: str) -> None:
        """What `finish` raises begins with ``where``."""
        self._bucket = bucket
        self._where = where
        self._header: bytearray | None = bytearray()  # None once it is read
        self._places: list[tuple[int, int, int]] = []  # begin and end after the header, and where that is in the state
        self._at = 0  # bytes that have come after the header
        self._problem = ""

    def take(self, piece: bytes | memoryview) -> None:
        """The next piece."""
        piece = memoryview(piece)
        if self._problem:
            return
        if self._header is not None:
            piece = self._take_header(self._header, piece)
        while len(piece) and not self._problem:
            if not self._places:
                self._problem = "it is longer than its header says"
                return
            begin, end, start = self._places[0]
            fits = piece[: end - self._at]
            self._bucket.load(fits, start + self._at - begin)
            self._at += len(fits)
            piece = piece[len(fits) :]
            if self._at == end:
                self._places.pop(0)

    def finish(self) -> None:
        """To be called after the last piece.

        Raises:
            ValueError: it is not a bucket's file, or of another model or precision.
        """
        if not self._problem and (self._header is not None or self._places):
            self._problem = f"it ends after {self._at} bytes of the state"
        if self._problem:
            raise ValueError(f"{self._where}: {self._problem}")

    def _take_header(self, header: bytearray, piece: memoryview) -> memoryview:
        """Returns what follows the header in ``piece``."""
        before = len(header)
        header += piece[: LENGTH_BYTES + MOST_HEADER_BYTES - before]
        if len(header) < LENGTH_BYTES:
            return memoryview(b"")
        length = LENGTH_BYTES + int.from_bytes(header[:LENGTH_BYTES], "little")
        if length > LENGTH_BYTES + MOST_HEADER_BYTES:
            self._problem = "it is no safetensors file"
        elif len(header) >= length:
            try:
                self._places = _places(header[LENGTH_BYTES:length], self._bucket)
            except ValueError as problem:
                self._problem = str(problem)
            self._header = None
            return piece[length - before :]
        return memoryview(b"")


def _places(header: bytes | bytearray, bucket: Bucket) -> list[tuple[int, int, int]]:
    """Where each tensor begins and ends in the file, after its header, and where it begins in the bucket's state; in the file's
    order. Raises ValueError."""
    try:
        found = json.loads(header)
        found.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in found.items()}
        dtypes = {name: str(entry["dtype"]) for name, entry in found.items()}
        ranges = {
            name: (operator.index(begin), operator.index(end))
            for name, entry in found.items()
            for begin, end in [entry["data_offsets"]]
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("it is no safetensors file") from None
    expected, dtype = _tensors(bucket.spec), bucket.parameters.dtype
    if shapes != expected:
        name = next(name for name in (*expected, *shapes) if shapes.get(name) != expected.get(name))
        raise ValueError(
            f"{name:.200} has shape {shapes.get(name, 'missing')}, but the run's model says "
            f"{expected.get(name, 'no such parameter')}; resume with the model that the checkpoint was made with"
        )
    if other := next(((name, kind) for name, kind in dtypes.items() if kind != _DTYPES[dtype]), None):
        known = {name: str(kind) for kind, name in _DTYPES.items()}
        raise ValueError(
            f"{other[0]} is {known.get(other[1], other[1]):.50}, but the run computes in {dtype}; resume with the "
            "train.precision that the checkpoint was made with"
        )
    places, start = [], 0
    for name, shape in expected.items():
        size = math.prod(shape) * dtype.itemsize
        places.append((*ranges[name], start))
        start += size
        if ranges[name][1] - ranges[name][0] != size:
            raise ValueError(f"its header gives {name} {ranges[name][1] - ranges[name][0]} bytes instead of {size}")
    places.sort()
    ends = [0, *(end for _, end, _ in places)]
    if [begin for begin, _, _ in places] != ends[:-1]:
        raise ValueError("the tensors that its header names do not follow one another")
    return [place for place in places if place[0] < place[1]]


def write_model_files(folder: str, model: Model, data: Data, dtype: torch.dtype = torch.float32) -> None:
    """Writes config.json and the tokenizer's files, with which transformers can load the weights.

    ``dtype`` is that of the weights. Raises as `write` does.
    """
    with tempfile.TemporaryDirectory(prefix="dtfm-model-") as local:
        model.save_config(Path(local), dtype)
        if data.tokenizer is not None:
            data.tokenizer.save(Path(local))
        for file in sorted(Path(local).iterdir()):
            write(folder, file.name, file.read_bytes())


def read_bucket(folder: str, bucket: Bucket, manifest: bytes = b"") -> None:
    """Reads a bucket's state from the checkpoint at ``folder`` into ``bucket``, which keeps its device. After an error the bucket
    may have anything in it. ``manifest``: the BLAKE3 of the checkpoint's manifest, if that is known.

    Raises:
        CheckpointDamaged: no whole checkpoint there, another one, or a damaged one.
        ValueError: it is of another model or precision.
        OSError, or another exception of the file system: not readable.
    """
    index = bucket.spec.index
    where = f"checkpoint {folder}, bucket {index}"
    entry = _manifest_entry(folder, index, manifest)
    loading, digest, size = Loading(bucket, where), blake3(), 0
    for piece in _bounded(folder, entry["file"], most_bytes(bucket.spec, bucket.parameters.dtype)):
        digest.update(piece)
        size += len(piece)
        loading.take(piece)
    if (size, digest.hexdigest()) != (entry["bytes"], entry["blake3"]):
        raise CheckpointDamaged(f"{where}: {entry['file']} is damaged (its BLAKE3 differs); use an older checkpoint")
    loading.finish()


def _manifest_entry(folder: str, index: int, digest: bytes) -> dict[str, Any]:
    """The bucket's entry in the manifest: {"index", "file", "bytes", "blake3"}."""
    try:
        text = b"".join(_bounded(folder, MANIFEST, _MOST_MANIFEST_BYTES))
        if digest and blake3(text).digest() != digest:
            raise CheckpointDamaged(
                f"checkpoint {folder}: {MANIFEST} is not the one that the coordinator wrote (its BLAKE3 differs); somebody has "
                "replaced it. Use an older checkpoint, and look at who may write there"
            )
        manifest = json.loads(text)
    except FileNotFoundError:
        raise CheckpointDamaged(
            f"checkpoint {folder} has no {MANIFEST}: it was never finished; use an older one"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"checkpoint {folder}: {MANIFEST} is not JSON ({problem}); use an older one") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise ValueError(f"checkpoint {folder} has format {version!r}, this node reads {FORMAT}; update the older side")
    buckets = manifest.get("buckets")
    entries = (
        [e for e in buckets if isinstance(e, dict) and e.get("index") == index] if isinstance(buckets, list) else []
    )
    if len(entries) != 1:
        raise ValueError(f"checkpoint {folder}: {MANIFEST} does not list bucket {index} once")
    (entry,) = entries
    if bucket_of(str(entry.get("file"))) != index:
        raise ValueError(f"checkpoint {folder}: {MANIFEST} names a file for bucket {index} that cannot be its")
    if not isinstance(entry.get("bytes"), int) or not isinstance(entry.get("blake3"), str):
        raise ValueError(f"checkpoint {folder}: {MANIFEST} does not say the size and the BLAKE3 of bucket {index}")
    return entry


def _bounded(folder: str, name: str, most: int) -> Iterator[bytes]:
    """The file's pieces. Raises ValueError if it is longer than ``most`` bytes."""
    for piece in read_pieces(folder, name):
        most -= len(piece)
        if most < 0:
            raise ValueError(f"checkpoint {folder}: {name} is longer than the bucket can need")
        yield piece


def _tensors(spec: BucketSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors by name, in the order in which their bytes are in the state."""
    return dict(spec.parameters) | dict.fromkeys(MOMENTS, (spec.size,))
