"""The files of a snapshot: a bucket as a safetensors file and back, piece by piece, written to and read from any fsspec URL.

A bucket's file has the parameters under their state-dict names, then the rest of its state as flat tensors: a header, and after
it the bytes of `Bucket.read`. In a checkpoint it may have the parameters alone. A checkpoint is whole when its manifest.json
exists, which the coordinator writes last.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import save

from dtfm.node.data.dataset import Data
from dtfm.node.data.reaching import open_place, withheld
from dtfm.node.data.shared.storage import PIECE_BYTES, write
from dtfm.node.host.work import WORK
from dtfm.node.model.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.model import Model
from dtfm.protos.bucket_layout import FURTHER_NAMES, LENGTH_BYTES, MOMENTS, MOMENTUM, layout_digest
from dtfm.protos.checkpoint_names import BUFFERS, MANIFEST as MANIFEST

log = logging.getLogger(__name__)

FORMAT = 1
_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
"""By the state's dtype, its name in a file."""
_MOST_MANIFEST_BYTES = 1 << 24
MOST_CONSTANTS_BYTES = 32 << 20
"""Of the tensors of a model that nobody trains."""


class SnapshotDamaged(ValueError):
    """A checkpoint differs from the one that was written, or from the one that the coordinator means: an older one may be good.
    Or a part of a snapshot is damaged on every disk that should have it, or is of another model."""


def file_name(bucket: int) -> str:
    """In a snapshot on this node's own disk."""
    return f"bucket-{bucket:05d}.safetensors"


def file_header(spec: BucketSpec, dtype: torch.dtype, *, weights: bool = False) -> bytes:
    """The beginning of a bucket's file, before the state, or before the ``weights`` alone. The format is described in the README
    of safetensors."""
    metadata = {"format": "pt"}
    if spec.further_names:
        metadata[FURTHER_NAMES] = json.dumps(spec.further_names)
    entries: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    names = () if weights else (*MOMENTS, MOMENTUM)[: spec.tensors - 1]
    for name, shape in (
        *spec.parameters,
        *((name, (size,)) for name, size in zip(names, spec.sizes[1:], strict=False)),
    ):
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def file_layout(spec: BucketSpec, dtype: torch.dtype) -> bytes:
    """The run's description of a bucket's file; see protos/bucket_layout.py."""
    whole, weights = file_header(spec, dtype), file_header(spec, dtype, weights=True)
    size = bucket_bytes(spec, dtype)
    return layout_digest(whole[LENGTH_BYTES:], size) + layout_digest(weights[LENGTH_BYTES:], spec.size * dtype.itemsize)


def file_bytes(spec: BucketSpec, dtype: torch.dtype, *, weights: bool = False) -> int:
    """The size of the bucket's file, or of one with the ``weights`` alone."""
    size = bucket_bytes(spec, dtype)
    return len(file_header(spec, dtype, weights=weights)) + (spec.size * dtype.itemsize if weights else size)


class Loading:
    """A bucket's file, piece by piece from its first byte on, on its way into ``bucket``, which keeps its device.

    The bucket must not be used before `finish` has returned without an error, and before the caller has compared the digest of
    the whole.
    """

    def __init__(self, bucket: Bucket, where: str, *, weights: bool = False) -> None:
        """``where``: the beginning of `finish`'s errors. ``weights``: the file has the parameters alone, and the rest of the
        bucket does not change."""
        self._bucket, self._where = bucket, where
        self._header = file_header(bucket.spec, bucket.parameters.dtype, weights=weights)
        self._size = file_bytes(bucket.spec, bucket.parameters.dtype, weights=weights)
        self._at = 0  # bytes that have come
        self._sound = True

    def take(self, piece: bytes | memoryview) -> None:
        """The next piece."""
        header = self._header[self._at : self._at + len(piece)]
        begin, self._at = self._at + len(header), self._at + len(piece)
        self._sound = self._sound and self._at <= self._size and piece[: len(header)] == header
        if self._sound and begin < self._at:
            self._bucket.load(memoryview(piece)[len(header) :], begin - len(self._header))

    def finish(self) -> None:
        """To be called after the last piece.

        Raises:
            ValueError: it is another file than this bucket has in a run of this model and precision.
        """
        if not self._sound or self._at < self._size:
            raise ValueError(
                f"{self._where}: its {self._at} bytes are not what a bucket of the run's model has in "
                f"{self._bucket.parameters.dtype}, which are {self._size}; resume with the model and the train.precision that it "
                "was made with"
            )


def write_model_files(folder: str, model: Model, data: Data, dtype: torch.dtype = torch.float32) -> None:
    """Writes the files that go with the weights: config.json, generation_config.json, the tokenizer's, and the model's constants.

    ``dtype`` is the type of the weights. Raises as `write` does.
    """
    with tempfile.TemporaryDirectory(prefix="dtfm-model-") as local:
        model.save_config(Path(local), dtype, data.tokenizer.special_ids if data.tokenizer is not None else {})
        if data.tokenizer is not None:
            data.tokenizer.save(Path(local))
        if constants := constants_file(model.constants):
            (Path(local) / BUFFERS).write_bytes(constants)
        for file in sorted(Path(local).iterdir()):
            write(folder, file.name, file.read_bytes())


def constants_file(constants: Mapping[str, torch.Tensor]) -> bytes:
    """A safetensors file; empty if there are no constants, or more than go with a checkpoint."""
    size = sum(tensor.nbytes for tensor in constants.values())
    if size > MOST_CONSTANTS_BYTES:
        log.warning(
            "the model's buffers have %d bytes, and at most %d go with a checkpoint: they are left out. Register those that "
            "can be computed again with persistent=False",
            size,
            MOST_CONSTANTS_BYTES,
        )
    if not size or size > MOST_CONSTANTS_BYTES:
        return b""
    return save({name: tensor.contiguous().clone() for name, tensor in constants.items()}, {"format": "pt"})


def read_bucket(folder: str, bucket: Bucket, manifest: bytes, *, weights: bool = False) -> None:
    """Reads a bucket's state from the checkpoint at ``folder`` into ``bucket``, which keeps its device. After an error the bucket
    may have anything in it. ``manifest``: the BLAKE3 of the checkpoint's manifest, as the coordinator
    has logged it. ``weights``: the checkpoint has the parameters alone.

    Raises:
        SnapshotDamaged: no whole checkpoint there, another one, or a damaged one.
        ValueError: it is of another model or precision.
        OSError, or another exception of the file system: not readable.
    """
    index = bucket.spec.index
    where = f"checkpoint {folder}, bucket {index}"
    entry = _manifest_entry(folder, index, manifest)
    loading, digest, size = Loading(bucket, where, weights=weights), blake3(), 0
    for piece in read_pieces(folder, entry["file"], file_bytes(bucket.spec, bucket.parameters.dtype, weights=weights)):
        digest.update(piece)
        size += len(piece)
        loading.take(piece)
    if (size, digest.hexdigest()) != (entry["bytes"], entry["blake3"]):
        raise SnapshotDamaged(f"{where}: {entry['file']} is damaged (its BLAKE3 differs); use an older checkpoint")
    loading.finish()


def _manifest_entry(folder: str, index: int, digest: bytes) -> dict[str, Any]:
    """The bucket's entry in the manifest: {"index", "file", "bytes", "blake3"}, as the coordinator wrote it."""
    try:
        text = b"".join(read_pieces(folder, MANIFEST, _MOST_MANIFEST_BYTES))
    except FileNotFoundError:
        raise SnapshotDamaged(
            f"checkpoint {folder} has no {MANIFEST}: it was never finished; use an older one"
        ) from None
    if blake3(text).digest() != digest:
        raise SnapshotDamaged(
            f"checkpoint {folder}: {MANIFEST} is not the one that the coordinator wrote (its BLAKE3 differs); somebody has "
            "replaced it. Use an older checkpoint, and look at who may write there"
        )
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        version = manifest["format"]
        raise ValueError(f"checkpoint {folder} has format {version!r}, this node reads {FORMAT}; update the older side")
    return next(entry for entry in manifest["buckets"] if entry["index"] == index)


def read_pieces(folder: str, name: str, most: int) -> Iterator[bytes]:
    """The file's content, PIECE_BYTES at a time. Raises ValueError if it is longer than ``most`` bytes, and OSError, or another
    exception of the file system."""
    with withheld("checkpoint.uri", folder):
        fs, path = open_place(folder)
        opened = fs.open(f"{path.rstrip('/')}/{name}", "rb", block_size=PIECE_BYTES)
    with opened as file:
        while True:
            with withheld("checkpoint.uri", folder):
                piece = file.read(PIECE_BYTES)
            if not piece:
                return
            most -= len(piece)
            if most < 0:
                raise ValueError(
                    f"checkpoint {folder}: {name} is longer than one of the run's model and precision; resume with those that "
                    "it was made with"
                )
            WORK.did()
            yield piece
