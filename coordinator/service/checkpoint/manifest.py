"""A checkpoint's manifest.json: which files it has, of which step and run. A folder without one is no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
from blake3 import blake3

from dtfm.protos.checkpoint_names import bucket_of

FORMAT = 1

MAX_MANIFEST_BYTES = 16 << 20


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
    ``step``. ``ahead``: see Rounds."""

    run: Mapping[str, Any]
    run_id: str
    step: int
    buckets: tuple[BucketFile, ...]
    exchanges: int = 0
    ahead: int = 0

    @property
    def weights(self) -> bool:
        """Whether the checkpoint has the weights alone."""
        return any(bucket.moments for bucket in self.buckets)


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
        exchanges, ahead = (int(fields.get(name, 0)) for name in ("exchanges", "ahead"))
        manifest = Manifest(run, run_id, step, buckets, exchanges, ahead)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}/manifest.json is malformed ({error!r}); it is not one of ours") from None
    if any(bucket_of(b.file) is None for b in buckets):
        raise CheckpointError(f"{folder}/manifest.json names files outside the checkpoint; it is not one of ours")
    return manifest, blake3(text).hexdigest()
