"""A checkpoint's folder: one safetensors file per bucket, and manifest.json, which is written last and makes it whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import fsspec
from blake3 import blake3

from dtfm.coordinator.log.events import SnapshotPart
from dtfm.protos.bucket_layout import LENGTH_BYTES, MOST_HEADER_BYTES, layout_of_file
from dtfm.protos.checkpoint_names import bucket_file, bucket_of, marker_file, step_folder, step_of

FORMAT = 1
MAX_MANIFEST_BYTES = 16 << 20

FIRST_BYTES = 1 << 16
"""Of a bucket's file that are read at once to look at its header, which mostly is shorter."""


class CheckpointError(ValueError):
    """The checkpoint cannot be used. The message says why, and what to do. ``bucket``: whose file is to blame, if one is."""

    def __init__(self, message: str, bucket: int | None = None) -> None:
        super().__init__(message)
        self.bucket = bucket


@dataclass(frozen=True, slots=True)
class BucketFile:
    """``blake3`` is hex, of the whole file."""

    index: int
    file: str
    bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """``run`` is the run file as JSON, so that a checkpoint alone is enough to go on."""

    run: Mapping[str, Any]
    run_id: str
    step: int
    buckets: tuple[BucketFile, ...]


def write_manifest(
    folder: str,
    run: Mapping[str, Any],
    run_id: str,
    step: int,
    parts: Sequence[SnapshotPart],
    layout_of: Callable[[int], str] = lambda _: "",
) -> str:
    """Makes the checkpoint whole; ``parts`` are in order of bucket. ``layout_of``: by bucket, the digest (hex) of its file's
    layout; empty: not known. Returns the BLAKE3 (hex) of the manifest. Raises CheckpointError if a file is missing, has another
    size than its node reported, or other tensors than the run's model."""
    buckets = tuple(
        BucketFile(index, bucket_file(index, part.nonce), part.size_bytes, part.digest)
        for index, part in enumerate(parts)
    )
    try:
        filesystem, path = fsspec.url_to_fs(folder)
        filesystem.invalidate_cache()
        for bucket in buckets:
            _check_size(filesystem, f"{path}/{bucket.file}", bucket)
            _check_layout(filesystem, f"{path}/{bucket.file}", bucket, layout_of(bucket.index))
        manifest = {"format": FORMAT, **asdict(Manifest(run, run_id, step, buckets))}
        text = json.dumps(manifest, indent=1).encode()
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
            BucketFile(int(b["index"]), str(b["file"]), int(b["bytes"]), str(b["blake3"])) for b in fields["buckets"]
        )
        manifest = Manifest(dict(fields["run"]), str(fields["run_id"]), int(fields["step"]), buckets)
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
            f"checkpoints cannot be written to {uri}: {type(error).__name__}: {error}; make that possible, or name another place "
            "with checkpoint.uri"
        ) from None


def tidy(
    uri: str, run_id: str, newest: int, keep: int, *, under_way: Collection[int] = (), given_up: Collection[int] = ()
) -> None:
    """Deletes the run's checkpoints before its ``keep`` last whole ones up to step ``newest``, and what there is of those
    ``given_up``, but for the steps ``under_way``; and in the newest one's folder, what earlier attempts at it left.

    Other runs may share the folder: a whole checkpoint is this run's if its manifest says so, and one without a manifest goes
    only if it was given up. Raises CheckpointError if something cannot be deleted; the rest is."""
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
    """Folder of the newest whole checkpoint under ``uri``; None: there is none. Raises CheckpointError."""
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
        raise CheckpointError(f"cannot look into {uri}: {error}") from None


def _steps(filesystem: Any, path: str) -> list[int]:
    """The steps of which there is a folder, the newest first."""
    steps = (step_of(name) for name in _names(filesystem, path))
    return sorted((step for step in steps if step is not None), reverse=True)


def _names(filesystem: Any, path: str) -> list[str]:
    """What is in a folder."""
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


def _check_layout(filesystem: Any, path: str, wanted: BucketFile, layout: str) -> None:
    """That its header names the tensors of the run's model, in their order."""
    if not layout:
        return
    begin = filesystem.cat_file(path, start=0, end=min(wanted.bytes, FIRST_BYTES))
    length = LENGTH_BYTES + int.from_bytes(begin[:LENGTH_BYTES], "little")
    if len(begin) < length <= min(wanted.bytes, LENGTH_BYTES + MOST_HEADER_BYTES):
        begin = filesystem.cat_file(path, start=0, end=length)
    check_layout(begin[LENGTH_BYTES:length], wanted.bytes - length, layout, path, wanted.index)


def check_layout(header: bytes, data_bytes: int, layout: str, path: str, bucket: int) -> None:
    """Raises CheckpointError if the header of the file at ``path``, which so many bytes follow, has another layout."""
    try:
        problem = "" if layout_of_file(header, data_bytes).hex() == layout else "it names other tensors"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise CheckpointError(
            f"{path} does not have the tensors that the run's model has ({problem}): its writer has made it up. Use an older "
            "checkpoint",
            bucket,
        )
