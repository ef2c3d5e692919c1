"""``dtfm-coordinator export``: a checkpoint as a folder that transformers' ``from_pretrained`` loads.

The folder has the weights, without the optimizer's state, and the model's own files (configuration and tokenizer).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import fsspec
import numpy as np
import typer
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from dtfm.coordinator.command.options import DEFAULT_STORE, Json
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.log.manifest import BucketFile, CheckpointError, newest, read_manifest
from dtfm.coordinator.log.store import Store

SHARD_BYTES = 1 << 30
"""Least size of a file of weights, the last one apart: export needs memory for about one file."""

MAX_MODEL_FILE_BYTES = 64 << 20
"""Largest configuration or tokenizer file."""
Tensors = dict[str, NDArray[Any]]


def export(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write: a new or empty one.")],
    checkpoint: Annotated[
        str, typer.Option(help="URL (fsspec) of a checkpoint, or of a folder of checkpoints: the newest is exported.")
    ] = "",
    store: Annotated[
        str, typer.Option(help="Without --checkpoint: the event log (a SQLAlchemy URL) that names the newest one.")
    ] = DEFAULT_STORE,
    json_lines: Json = False,
) -> None:
    """Writes a checkpoint as a folder that transformers' from_pretrained loads."""
    folder = (newest(checkpoint) or checkpoint) if checkpoint else _logged_checkpoint(store)
    step = export_checkpoint(folder, target)
    if json_lines:
        print(json.dumps({"checkpoint": folder, "step": step, "folder": str(target)}))
    else:
        print(f"Step {step} of {folder} is in {target}.")


def _logged_checkpoint(store: str) -> str:
    with Store(store, write=False) as opened:
        ledger = fold(record.event for record in opened.read())
    if not ledger.checkpoints:
        raise CheckpointError(f"{store} names no checkpoint; give one with --checkpoint")
    return ledger.checkpoints[ledger.checkpoint_step]


def export_checkpoint(folder: str, target: Path) -> int:
    """Writes the checkpoint at ``folder`` (an fsspec URL) into the new folder ``target``; returns its step.

    Leaves nothing behind when it fails. Raises CheckpointError for a checkpoint that is incomplete or damaged, and ValueError
    for a target in use.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give a new one")
    manifest = read_manifest(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        filesystem, path = fsspec.url_to_fs(folder)
        _copy_model_files(filesystem, path, partial)
        _write_shards(_shards(filesystem, path, manifest.buckets), partial)
        os.chmod(partial, 0o755)
        partial.replace(target)
    except OSError as error:
        raise CheckpointError(f"cannot export {folder} to {target}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest.step


def _copy_model_files(filesystem: Any, path: str, target: Path) -> None:
    """Copies config.json and the tokenizer's files: everything but the buckets and their manifest."""
    for entry in filesystem.ls(path, detail=True):
        name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
        if entry["type"] != "file" or name == "manifest.json" or name.startswith("bucket-") or name.endswith(".part"):
            continue
        if entry["size"] > MAX_MODEL_FILE_BYTES:
            raise CheckpointError(
                f"{path}/{name} has {entry['size']} bytes; at most {MAX_MODEL_FILE_BYTES} are possible"
            )
        (target / name).write_bytes(filesystem.cat_file(entry["name"]))


def _shards(filesystem: Any, path: str, buckets: tuple[BucketFile, ...]) -> Iterator[Tensors]:
    shard: Tensors = {}
    for bucket in buckets:
        shard |= _read_weights(filesystem, path, bucket)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _read_weights(filesystem: Any, path: str, bucket: BucketFile) -> Tensors:
    content = filesystem.cat_file(f"{path}/{bucket.file}")
    if len(content) != bucket.bytes or blake3(content).hexdigest() != bucket.blake3:
        raise CheckpointError(f"{path}/{bucket.file} is damaged (its BLAKE3 differs); use an older checkpoint")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise CheckpointError(f"{path}/{bucket.file} is not safetensors: {error}") from None
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


def _write_shards(shards: Iterator[Tensors], target: Path) -> None:
    """Writes one file, model.safetensors, or several files and the index that transformers reads."""
    files: list[tuple[Path, list[str]]] = []
    size = 0
    for number, tensors in enumerate(shards):
        file = target / f"part-{number}"
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, file, {"format": "pt"})
        file.chmod(0o644)  # safetensors creates files that only their owner can read
        files.append((file, list(tensors)))
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) == 1:
        files[0][0].rename(target / "model.safetensors")
        return
    weights: dict[str, str] = {}
    for number, (file, names) in enumerate(files, 1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(target / final)
        weights |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": size}, "weight_map": weights}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
