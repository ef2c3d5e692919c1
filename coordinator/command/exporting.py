"""Writes a checkpoint as a folder that transformers' ``from_pretrained`` loads.

The folder has the weights, without the optimizer's state, and the model's own files (configuration and tokenizer).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from dtfm.coordinator.command.client import ask, open_way, told
from dtfm.coordinator.log.events import CheckpointFailed
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.service.checkpoint_folder import (
    INDEX,
    BucketFile,
    CheckpointError,
    Manifest,
    check_layout,
    manifest_and_digest,
    newest as newest,
    state_of_weights,
)
from dtfm.protos import control_pb2 as wire, coordinator_disk
from dtfm.protos.checkpoint_names import MANIFEST
from dtfm.protos.run_file.run_file import parse_run

SHARD_BYTES = 1 << 30
"""Least size of a file of weights, the last one apart: export needs memory for about one file."""

MAX_MODEL_FILE_BYTES = 64 << 20
"""Largest configuration or tokenizer file."""
Tensors = dict[str, NDArray[Any]]


class NotTheLogs(CheckpointError):
    """What lies in the storage is not what the run's log says of it."""


async def newest_of(where: str) -> tuple[Ledger, str]:
    """Has the coordinator fetch the weights after the step in hand from the nodes, unless it has those of the last step. Returns
    the run's ledger, and the URL of that checkpoint. Raises ValueError."""
    reply: wire.Done = await ask(where, "Steer", wish="SAVE")
    print(f"{reply.sentence}.", file=sys.stderr)
    known = 0  # the last event when this was asked for
    async for so_far in told(where):
        ledger = so_far.ledger
        if ledger.copies.checkpoint_step >= reply.step:
            break
        known, last = known or so_far.sequence, so_far.recent[-1] if so_far.recent else None
        if last is not None and last.sequence > known and isinstance(failed := last.event, CheckpointFailed):
            raise CheckpointError(failed.narrate())
    else:
        raise CheckpointError(f"the coordinator has ended before the weights of step {reply.step} were there")
    folder = ledger.copies.checkpoints[ledger.copies.checkpoint_step].folder
    if not fsspec.url_to_fs(folder)[0].exists(folder):
        coordinator_disk.LINE.lead_to(await open_way(where))
        folder = parse_run(ledger.run, "the log").as_nodes_reach(folder)
    return ledger, folder


def logged_checkpoint(ledger: Ledger, store: str) -> str:
    if not ledger.copies.checkpoints:
        raise CheckpointError(f"{store} names no checkpoint; give one with --checkpoint")
    return ledger.copies.checkpoints[ledger.copies.checkpoint_step].folder


def check_target(target: Path) -> None:
    """Raises ValueError for a target in use."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give a new one")


def export_checkpoint(folder: str, target: Path, ledger: Ledger | None = None) -> int:
    """Writes the checkpoint at ``folder`` (an fsspec URL) into the new folder ``target``; returns its step.

    Leaves nothing behind when it fails. Raises CheckpointError for a checkpoint that is incomplete or damaged, NotTheLogs if it
    is not the one of the run's ``ledger``, and ValueError for a target in use.
    """
    check_target(target)
    manifest, digest = manifest_and_digest(folder)
    states = _agreed_states(folder, manifest, digest, ledger) if ledger is not None else ()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
        ) as name:
            partial, (filesystem, path) = Path(name), fsspec.url_to_fs(folder)
            _copy_model_files(filesystem, path, partial)
            described = ledger.described if ledger is not None else None
            layout_of = described.layout_of if described is not None else lambda _: ""
            _write_shards(_shards(filesystem, path, manifest.buckets, states, layout_of), partial)
            os.chmod(partial, 0o755)
            partial.replace(target)
    except OSError as error:
        raise CheckpointError(f"cannot export {folder} to {target}: {error}") from None
    return manifest.step


def _copy_model_files(filesystem: Any, path: str, target: Path) -> None:
    """Copies config.json and the tokenizer's files: everything but the buckets and their manifest."""
    for entry in filesystem.ls(path, detail=True):
        name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
        if entry["type"] != "file" or name in (MANIFEST, INDEX) or name.startswith("bucket-") or name.endswith(".part"):
            continue
        if entry["size"] > MAX_MODEL_FILE_BYTES:
            raise CheckpointError(
                f"{path}/{name} has {entry['size']} bytes; at most {MAX_MODEL_FILE_BYTES} are possible"
            )
        (target / name).write_bytes(filesystem.cat_file(entry["name"]))


def _agreed_states(folder: str, manifest: Manifest, digest: str, ledger: Ledger) -> tuple[str, ...]:
    """The digests (hex) of the checkpoint's state by bucket, as its trainers agreed on them; empty where the log does not say."""
    logged = ledger.copies.checkpoints.get(manifest.step)
    if logged is None or manifest.run_id != ledger.run_id:
        raise NotTheLogs(
            f"the log names no checkpoint of step {manifest.step} of run {manifest.run_id}, which {folder} is"
        )
    if logged.manifest != digest:
        raise NotTheLogs(
            f"{folder}/manifest.json is not the one that the log names (its BLAKE3 is {digest} instead of {logged.manifest}): "
            "somebody has replaced it. Use an older checkpoint, and look at who may write there"
        )
    return ledger.copies.digests(manifest.step)


def _shards(
    filesystem: Any,
    path: str,
    buckets: tuple[BucketFile, ...],
    states: tuple[str, ...],
    layout_of: Callable[[int], str],
) -> Iterator[Tensors]:
    shard: Tensors = {}
    whose: dict[str, str] = {}  # by tensor, the file that has it
    for bucket in buckets:
        state = states[bucket.index] if bucket.index < len(states) else ""
        weights = _read_weights(filesystem, path, bucket, state, layout_of(bucket.index))
        if twice := sorted(weights.keys() & whose.keys()):
            raise CheckpointError(
                f"{path}/{bucket.file} and {whose[twice[0]]} both have a tensor {twice[0]!r}: one of their writers has given "
                "it another's name. Use an older checkpoint"
            )
        whose |= dict.fromkeys(weights, bucket.file)
        shard |= weights
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _read_weights(filesystem: Any, path: str, bucket: BucketFile, state: str, layout: str) -> Tensors:
    """``state``, ``layout``: the digests (hex) that the bucket's state, and its file's layout, should have; empty: not known."""
    content = filesystem.cat_file(f"{path}/{bucket.file}")
    if len(content) != bucket.bytes or blake3(content).hexdigest() != bucket.blake3:
        raise CheckpointError(f"{path}/{bucket.file} is damaged (its BLAKE3 differs); use an older checkpoint")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise CheckpointError(f"{path}/{bucket.file} is not safetensors: {error}") from None
    if state not in ("", _state_digest(content, bucket.moments)):
        raise NotTheLogs(
            f"{path}/{bucket.file} is whole, but not the state that its trainers agreed on: its writer has made it up. Use an "
            "older checkpoint"
        )
    if layout:
        begin = 8 + int.from_bytes(content[:8], "little")
        try:
            data_bytes, weights = len(content) - begin, bool(bucket.moments)
            check_layout(content[8:begin], data_bytes, layout, f"{path}/{bucket.file}", bucket.index, weights=weights)
        except CheckpointError as error:
            raise NotTheLogs(str(error), bucket.index) from None
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


def _state_digest(content: bytes, moments: str) -> str:
    """Of a bucket's file, whose header is sound: the BLAKE3 (hex) of those of its parameters and the rest of its state, as nodes
    take it (Bucket.digest). Empty: they do not lie as nodes write them. ``moments``: see CheckpointFile."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:begin]), memoryview(content)[begin:]
    if moments:
        return state_of_weights(blake3(data).digest(), moments)
    found = [entry["data_offsets"] for name, entry in header.items() if name.startswith("optimizer.")]
    tensors = 1 + len(found)
    each = len(data) // tensors
    if found != [[i * each, (i + 1) * each] for i in range(1, tensors)]:
        return ""
    return blake3(b"".join(blake3(data[i * each : (i + 1) * each]).digest() for i in range(tensors))).hexdigest()


def _write_shards(shards: Iterator[Tensors], target: Path) -> None:
    """Writes one file, model.safetensors, or several files and the index that transformers reads."""
    files: list[tuple[Path, list[str]]] = []
    size = 0
    for number, tensors in enumerate(shards):
        file = target / f"part-{number}"
        stored = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
        save_file(stored, file, {"format": "pt"})
        file.chmod(0o644)  # safetensors creates files that only their owner can read
        files.append((file, list(tensors)))
        size += sum(each.nbytes for each in stored.values())
    if len(files) == 1:
        files[0][0].rename(target / "model.safetensors")
        return
    weights: dict[str, str] = {}
    for number, (file, names) in enumerate(files, 1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(target / final)
        weights |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": size}, "weight_map": weights}
    (target / INDEX).write_text(json.dumps(index, indent=1))
