"""The files of a snapshot: a bucket as a safetensors file and back, written to and read from any fsspec URL.

A bucket's file has the parameters under their state-dict names, then the two moments as flat tensors. A checkpoint is whole
when its manifest.json exists, which the coordinator writes last.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
import torch
from blake3 import blake3

from dtfm.node.data.dataset import Data
from dtfm.node.data.storage import write
from dtfm.node.model.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.model import Model

MANIFEST = "manifest.json"
FORMAT = 1
_MOMENTS = ("optimizer.exp_avg", "optimizer.exp_avg_sq")
# Bounds on what is read: on the header of a bucket's file, and on a manifest.
_MOST_HEADER_BYTES = 1 << 20
_MOST_MANIFEST_BYTES = 1 << 24


def file_name(bucket: int) -> str:
    return f"bucket-{bucket:05d}.safetensors"


def step_folder(root: str, step: int) -> str:
    """The folder (or URL) of a snapshot of ``step`` under ``root``."""
    return f"{root.rstrip('/')}/step-{step:08d}"


def to_file(bucket: Bucket) -> bytes:
    """The content of the file with the bucket's state."""
    tensors = {name: view.contiguous() for name, view in bucket.views(bucket.parameters.detach().cpu()).items()}
    tensors |= dict(zip(_MOMENTS, (bucket.exp_avg.cpu(), bucket.exp_avg_sq.cpu()), strict=True))
    return safetensors.torch.save(tensors, metadata={"format": "pt"})


def load_file(content: bytes, bucket: Bucket, where: str) -> None:
    """Inverse of `to_file`, into ``bucket``, which keeps its device.

    Raises:
        ValueError: of another model or precision; the message begins with ``where``.
    """
    tensors = safetensors.torch.load(content)
    size = (bucket.spec.size,)
    expected = dict(bucket.spec.parameters) | dict.fromkeys(_MOMENTS, size)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        name = next(name for name in (*expected, *found) if found.get(name) != expected.get(name))
        raise ValueError(
            f"{where}: {name} has shape {found.get(name, 'missing')}, but the run's model says "
            f"{expected.get(name, 'no such parameter')}; resume with the model that the checkpoint was made with"
        )
    for name, tensor in tensors.items():
        if tensor.dtype != bucket.parameters.dtype:
            raise ValueError(
                f"{where}: {name} is {tensor.dtype}, but the run computes in {bucket.parameters.dtype}; resume with the "
                "train.precision that the checkpoint was made with"
            )
    for name, view in bucket.views(bucket.parameters).items():
        view.copy_(tensors[name])
    bucket.exp_avg.copy_(tensors[_MOMENTS[0]])
    bucket.exp_avg_sq.copy_(tensors[_MOMENTS[1]])


def most_bytes(spec: BucketSpec, dtype: torch.dtype) -> int:
    """An upper bound on the size of the bucket's file."""
    return bucket_bytes(spec, dtype) + _MOST_HEADER_BYTES


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


def read_bucket(folder: str, bucket: Bucket) -> None:
    """Reads a bucket's state from the checkpoint at ``folder`` into ``bucket``, which keeps its device.

    Raises:
        ValueError: no whole checkpoint there, of another model or precision, or damaged.
        OSError, or another exception of the file system: not readable.
    """
    index, where = bucket.spec.index, f"checkpoint {folder}, bucket {bucket.spec.index}"
    entry = _manifest_entry(folder, index)
    content = _read(folder, file_name(index), most_bytes(bucket.spec, bucket.parameters.dtype))
    if len(content) != entry["bytes"] or blake3(content).hexdigest() != entry["blake3"]:
        raise ValueError(f"{where}: {file_name(index)} is damaged (its BLAKE3 differs); use an older checkpoint")
    load_file(content, bucket, where)


def _manifest_entry(folder: str, index: int) -> dict[str, Any]:
    """The bucket's entry in the manifest: {"index", "file", "bytes", "blake3"}."""
    try:
        manifest = json.loads(_read(folder, MANIFEST, _MOST_MANIFEST_BYTES))
    except FileNotFoundError:
        raise ValueError(f"checkpoint {folder} has no {MANIFEST}: it was never finished; use an older one") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"checkpoint {folder}: {MANIFEST} is not JSON ({problem}); use an older one") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise ValueError(f"checkpoint {folder} has format {version!r}, this node reads {FORMAT}; update the older side")
    buckets = manifest.get("buckets")
    entries = (
        [e for e in buckets if isinstance(e, dict) and e.get("index") == index] if isinstance(buckets, list) else []
    )
    if len(entries) != 1 or entries[0].get("file") != file_name(index):
        raise ValueError(f"checkpoint {folder}: {MANIFEST} does not list bucket {index} as one file {file_name(index)}")
    return entries[0]


def _read(folder: str, name: str, most: int) -> bytes:
    """The file's content. Raises ValueError if it is longer than ``most`` bytes."""
    fs, path = fsspec.core.url_to_fs(folder)
    with fs.open(f"{path.rstrip('/')}/{name}", "rb") as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"checkpoint {folder}: {name} is longer than {most} bytes, the most that the bucket can need")
    return content
