"""Makes a checkpoint's folder whole: checks its safetensors files, one per bucket, and writes manifest.json last.

A checkpoint with the weights alone also has an index, so that transformers' ``from_pretrained`` loads the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import fsspec
from blake3 import blake3
from fsspec.implementations.local import LocalFileSystem

from dtfm.coordinator.log.events import CheckpointFile
from dtfm.coordinator.service.checkpoint.adapter_file import checked_config, has_adapter, write_adapter
from dtfm.coordinator.service.checkpoint.manifest import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    BucketFile,
    CheckpointError,
    Manifest,
)
from dtfm.coordinator.view.model_card import CARD
from dtfm.protos.bucket_layout import LAYOUT_BYTES, LENGTH_BYTES, MOST_HEADER_BYTES, layout_digest
from dtfm.protos.checkpoint_names import BUFFERS, bucket_file
from dtfm.protos.published_files import ADAPTER_CONFIG, INDEX

FIRST_BYTES = 1 << 16
"""Bytes of a bucket's file to read first, for its header, which mostly is shorter."""

READ_BYTES = 4 << 20
"""The most bytes of a file that are in memory at a time."""


def write_manifest(
    folder: str,
    run: Mapping[str, Any],
    run_id: str,
    step: int,
    files: Sequence[CheckpointFile],
    layout_of: Callable[[int], str] = lambda _: "",
    states: Sequence[str] = (),
    exchanges: int = 0,
    card: Callable[[str], str] | None = None,
    ahead: int = 0,
) -> str:
    """Makes the checkpoint whole; ``files`` are in order of bucket. Returns the BLAKE3 (hex) of the manifest.

    ``layout_of``: by bucket, the digest (hex) of its file's layout; empty: not known. ``states``: the digests (hex) of the
    buckets' states, if they are known. Weights on this machine's disk are checked against them. ``card`` returns the model
    card, given the BLAKE3 (hex) of the manifest. Raises CheckpointError if a file is missing, or differs from the file that its
    node should have sent.
    """
    buckets = tuple(
        BucketFile(index, bucket_file(index, file.nonce), file.size_bytes, file.digest, file.moments)
        for index, file in enumerate(files)
    )
    try:
        filesystem, path = fsspec.url_to_fs(folder)
        filesystem.invalidate_cache()
        found, headers = dict[str, str](), list[tuple[str, bytes]]()
        for bucket in buckets:
            _check_size(filesystem, f"{path}/{bucket.file}", bucket)
            header = _header(filesystem, f"{path}/{bucket.file}", bucket)
            if layout := layout_of(bucket.index):  # the header names the tensors of the run's model, in their order
                size, weights = bucket.bytes - LENGTH_BYTES - len(header), bool(bucket.moments)
                check_layout(header, size, layout, f"{path}/{bucket.file}", bucket.index, weights=weights)
            if bucket.moments and isinstance(filesystem, LocalFileSystem):
                state = states[bucket.index] if bucket.index < len(states) else ""
                _check_state(f"{path}/{bucket.file}", bucket, LENGTH_BYTES + len(header), state)
            found |= dict.fromkeys(_tensors(header), bucket.file)
            headers.append((bucket.file, header))
        for name in _buffers(filesystem, path):
            found.setdefault(name, BUFFERS)
        manifest = Manifest(run, run_id, step, buckets, exchanges, ahead)
        if manifest.weights and has_adapter(run):
            write_adapter(filesystem, path, headers, READ_BYTES)
            _check_adapter_config(filesystem, f"{path}/{ADAPTER_CONFIG}", run)
        elif manifest.weights:
            size = sum(bucket.bytes for bucket in buckets)
            index = {"metadata": {"total_size": size}, "weight_map": found}
            filesystem.pipe_file(f"{path}/{INDEX}", json.dumps(index, indent=1).encode())
        text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1).encode()
        if card is not None:
            filesystem.pipe_file(f"{path}/{CARD}", card(blake3(text).hexdigest()).encode())
        temporary = f"{path}/manifest.json.part"
        filesystem.pipe_file(temporary, text)
        filesystem.mv(temporary, f"{path}/manifest.json")
        return blake3(text).hexdigest()
    except OSError as error:
        raise CheckpointError(f"the manifest could not be written to {folder}: {error}") from None


def _check_size(filesystem: Any, path: str, wanted: BucketFile) -> None:
    try:
        found = filesystem.size(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not there, though its node wrote it: checkpoint.uri must name storage that all machines share, like "
            f"a network mount or s3://",
            wanted.index,
        ) from None
    if found != wanted.bytes:
        raise CheckpointError(f"{path} has {found} bytes, though its node wrote {wanted.bytes}", wanted.index)


def _header(filesystem: Any, path: str, wanted: BucketFile) -> bytes:
    """The text of the file's header, as far as the file can have one."""
    begin = filesystem.cat_file(path, start=0, end=min(wanted.bytes, FIRST_BYTES))
    length = LENGTH_BYTES + int.from_bytes(begin[:LENGTH_BYTES], "little")
    if len(begin) < length <= min(wanted.bytes, LENGTH_BYTES + MOST_HEADER_BYTES):
        begin = filesystem.cat_file(path, start=0, end=length)
    return bytes(begin[LENGTH_BYTES:length])


def _buffers(filesystem: Any, path: str) -> list[str]:
    """The names of the tensors that are not trained, if the model has any."""
    if not filesystem.exists(f"{path}/{BUFFERS}"):
        return []
    size = filesystem.size(f"{path}/{BUFFERS}")
    return _tensors(_header(filesystem, f"{path}/{BUFFERS}", BucketFile(-1, BUFFERS, size, "")))


def _check_adapter_config(filesystem: Any, path: str, run: Mapping[str, Any]) -> None:
    """Has the file name the model as the run file does. Raises CheckpointError if it is no such file."""
    try:
        config = checked_config(filesystem.cat_file(path, start=0, end=MAX_MANIFEST_BYTES), run)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not what peft writes ({error}): use an older checkpoint") from None
    filesystem.pipe_file(path, config)


def _check_state(path: str, wanted: BucketFile, begin: int, state: str) -> None:
    """Raises CheckpointError unless the file is its node's, with the weights that their trainers agreed on."""
    whole, data = blake3(), blake3()
    with open(path, "rb") as file:
        whole.update(file.read(begin))
        while piece := file.read(READ_BYTES):
            whole.update(piece)
            data.update(piece)
    if whole.hexdigest() != wanted.blake3 or state not in ("", state_of_weights(data.digest(), wanted.moments)):
        raise CheckpointError(f"{path} has not the weights that their trainers agreed on", wanted.index)


def state_of_weights(digest: bytes, moments: str) -> str:
    """The digest (hex) of a bucket's state, as nodes take it (Bucket.digest), from the BLAKE3 ``digest`` of its weights.
    ``moments``: see CheckpointFile."""
    return blake3(digest + bytes.fromhex(moments)).hexdigest()


def _tensors(header: bytes) -> list[str]:
    """The names of the header's tensors. None: it is no header."""
    try:
        named = json.loads(header)
    except ValueError:
        return []
    return [name for name in named if name != "__metadata__"] if isinstance(named, dict) else []


def check_layout(header: bytes, data_bytes: int, layout: str, path: str, bucket: int, *, weights: bool) -> None:
    """Raises CheckpointError if the header of the file at ``path`` has another layout. ``data_bytes`` follow the header."""
    whole, alone = layout[:LAYOUT_BYTES], layout[LAYOUT_BYTES:]  # in hex
    if layout_digest(header, data_bytes).hex() != (alone if weights else whole):
        raise CheckpointError(
            f"{path} does not have the tensors that the run's model has: its writer has made it up. Use an older checkpoint",
            bucket,
        )
