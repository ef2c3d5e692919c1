"""A checkpoint's folder: one safetensors file per bucket, and manifest.json, which is written last and makes it whole.

A checkpoint with the weights alone also has an index, so that transformers' ``from_pretrained`` loads the folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import fsspec
from blake3 import blake3
from fsspec.implementations.local import LocalFileSystem

from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.log.events import CheckpointFile
from dtfm.coordinator.service.checkpoint.adapter_file import ADAPTER_CONFIG, checked_config, has_adapter, write_adapter
from dtfm.coordinator.view.model_card import CARD
from dtfm.protos import control_pb2 as wire
from dtfm.protos.bucket_layout import LAYOUT_BYTES, LENGTH_BYTES, MOST_HEADER_BYTES, layout_digest
from dtfm.protos.checkpoint_names import BUFFERS, bucket_file, bucket_of, marker_file, step_folder, step_of
from dtfm.protos.places import told_by

FORMAT = 1
INDEX = "model.safetensors.index.json"
"""transformers looks here for the files of a model."""
MAX_MANIFEST_BYTES = 16 << 20

FIRST_BYTES = 1 << 16
"""Bytes of a bucket's file to read first, for its header, which mostly is shorter."""

READ_BYTES = 4 << 20
"""The most bytes of a file that are in memory at a time."""


class CheckpointError(ValueError):
    """The checkpoint cannot be used. The message names the cause and the fix. ``bucket``: the bucket whose file is to blame, if
    one is."""

    def __init__(self, message: str, bucket: int | None = None) -> None:
        super().__init__(message)
        self.bucket = bucket


@dataclass(frozen=True, slots=True)
class BucketFile:
    """``blake3`` is hex, of the whole file. ``moments``: see CheckpointFile."""

    index: int
    file: str
    bytes: int
    blake3: str
    moments: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """``run`` is the run file as JSON, so that a checkpoint alone is enough to go on. ``exchanges``: their number up to
    ``step``."""

    run: Mapping[str, Any]
    run_id: str
    step: int
    buckets: tuple[BucketFile, ...]
    exchanges: int = 0

    @property
    def weights(self) -> bool:
        """Whether the checkpoint has the weights alone."""
        return any(bucket.moments for bucket in self.buckets)


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
        manifest = Manifest(run, run_id, step, buckets, exchanges)
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


def read_manifest(folder: str) -> Manifest:
    """The manifest of a whole checkpoint. Raises CheckpointError."""
    return manifest_and_digest(folder)[0]


def manifest_and_digest(folder: str) -> tuple[Manifest, str]:
    """The manifest of a whole checkpoint, and its BLAKE3 (hex). Raises CheckpointError."""
    try:
        filesystem, path = fsspec.url_to_fs(folder)
        if filesystem.size(f"{path}/manifest.json") > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{folder}/manifest.json is larger than {MAX_MANIFEST_BYTES} bytes; it is not one of ours"
            )
        text = filesystem.cat_file(f"{path}/manifest.json")
        fields = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no whole checkpoint (no manifest.json)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}/manifest.json cannot be read: {error}") from None
    try:
        if fields["format"] != FORMAT:
            raise CheckpointError(
                f"{folder} has checkpoint format {fields['format']}, this dtfm reads {FORMAT}; update it"
            )
        buckets = tuple(
            BucketFile(int(b["index"]), str(b["file"]), int(b["bytes"]), str(b["blake3"]), str(b.get("moments", "")))
            for b in fields["buckets"]
        )
        run, run_id, step = dict(fields["run"]), str(fields["run_id"]), int(fields["step"])
        manifest = Manifest(run, run_id, step, buckets, int(fields.get("exchanges", 0)))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}/manifest.json is malformed ({error!r}); it is not one of ours") from None
    if any(bucket_of(b.file) is None for b in buckets):
        raise CheckpointError(f"{folder}/manifest.json names files outside the checkpoint; it is not one of ours")
    return manifest, blake3(text).hexdigest()


def mark(uri: str, run_id: str) -> None:
    """Marks the folder for checkpoints as the run's, so that nodes see whether they reach the same one. Raises CheckpointError if
    it cannot be written."""
    try:
        filesystem, path = fsspec.url_to_fs(uri)
        filesystem.makedirs(path, exist_ok=True)
        filesystem.pipe_file(f"{path.rstrip('/')}/{marker_file(run_id)}", b"")
    except Exception as error:  # a storage's driver may raise anything
        raise CheckpointError(
            f"checkpoints cannot be written to {uri}: {told_by(uri, error)}; make that possible, or name another place with "
            "checkpoint.uri"
        ) from None


def tidy(
    uri: str, run_id: str, newest: int, keep: int, *, under_way: Collection[int] = (), given_up: Collection[int] = ()
) -> None:
    """Deletes the run's old checkpoints: all before its ``keep`` last whole ones up to step ``newest``. Also deletes the
    remains of the ones ``given_up``, except the steps ``under_way``. In the newest checkpoint's folder it deletes the files of
    earlier attempts.

    Other runs may share the folder: a whole checkpoint is this run's if its manifest says so, and a checkpoint without a
    manifest goes only if it was given up. Raises CheckpointError if something cannot be deleted; the rest is.
    """
    problems: list[str] = []
    try:
        filesystem, path = fsspec.url_to_fs(uri)
        steps = [step for step in _steps(filesystem, path) if step <= newest or step in given_up]
        whole = {step for step in steps if filesystem.exists(f"{path}/step-{step:08d}/manifest.json")}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot look into {uri} for older checkpoints: {error}") from None
    mine = []
    for step in steps:
        try:
            if step in whole and read_manifest(step_folder(uri, step)).run_id == run_id:
                mine.append(step)
        except CheckpointError as error:
            problems.append(f"it is not known whose checkpoint this is: {error}")
    kept = {newest, *[step for step in mine if step not in given_up][:keep], *under_way}
    for step in sorted({*mine, *(set(given_up).intersection(steps) - whole)} - kept, reverse=True):
        folder = f"{path}/step-{step:08d}"
        try:
            if step in whole:
                filesystem.rm_file(f"{folder}/manifest.json")  # first: without it, it is no checkpoint
            filesystem.rm(folder, recursive=True)
        except (OSError, ValueError) as error:
            problems.append(f"{folder} could not be deleted: {error}")
    if newest in mine and newest not in under_way:
        named = {bucket.file for bucket in read_manifest(step_folder(uri, newest)).buckets}
        for name in _names(filesystem, f"{path}/step-{newest:08d}"):
            if bucket_of(name) is not None and name not in named:
                try:
                    filesystem.rm_file(f"{path}/step-{newest:08d}/{name}")
                except (OSError, ValueError) as error:
                    problems.append(f"{name} of step {newest} could not be deleted: {error}")
    if problems:
        raise CheckpointError("; ".join(problems))


def newest(uri: str) -> str | None:
    """Folder of the newest whole checkpoint under ``uri``, or None. Raises CheckpointError."""
    try:
        filesystem, path = fsspec.url_to_fs(uri)
        return next(
            (
                step_folder(uri, step)
                for step in _steps(filesystem, path)
                if filesystem.exists(f"{path}/step-{step:08d}/manifest.json")
            ),
            None,
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot look into {uri}: {told_by(uri, error)}; make that possible, or name another place with checkpoint.uri"
        ) from None


def _steps(filesystem: Any, path: str) -> list[int]:
    """The steps that have a folder, the newest first."""
    steps = (step_of(name) for name in _names(filesystem, path))
    return sorted((step for step in steps if step is not None), reverse=True)


def _names(filesystem: Any, path: str) -> list[str]:
    """The names in a folder."""
    filesystem.invalidate_cache()
    return [str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in filesystem.ls(path, detail=False)]


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


async def claim(place: str, run_id: str, seconds: float) -> None:
    """Marks the place as the run's: an operator names it while the run goes on. Raises Refused if that is not possible within
    ``seconds``, or if another run's checkpoints are there."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.to_thread(_claim, place, run_id)
    except TimeoutError:
        raise Refused(
            wire.MALFORMED, f"{place} has not answered within {seconds:g} seconds; name another place"
        ) from None
    except CheckpointError as problem:
        raise Refused(wire.MALFORMED, str(problem)) from None


def _claim(place: str, run_id: str) -> None:
    mark(place, run_id)
    folder = newest(place)
    if folder is not None and (other := read_manifest(folder)).run_id != run_id:
        raise CheckpointError(
            f"{place} holds checkpoints of another run, {other.run.get('name')!r}; name another place"
        )
