"""What a checkpoint's folders and files are called: nodes write the files, and the coordinator's manifest names them."""

from __future__ import annotations

import re

from dtfm.protos.places import is_local_url

MANIFEST = "manifest.json"
BUFFERS = "buffers.safetensors"
"""The model's tensors that are not trained, and that its state dict has."""
NONCE_BYTES = 16

_BUCKET = re.compile(r"bucket-([0-9]{5,9})(?:-[0-9a-f]{32})?\.safetensors")
_STEP = re.compile(r"step-([0-9]{8,9})")
_GATHERING = re.compile(r"step-([0-9]{8,9})\.([0-9A-Za-z_-]{1,64})\.partial")


def step_folder(root: str, step: int) -> str:
    """The folder (or URL) of the checkpoint of ``step`` under ``root``."""
    return f"{root.rstrip('/')}/step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step of a folder of this name, without those above it; None: it is no checkpoint's."""
    match = _STEP.fullmatch(folder)
    return int(match[1]) if match else None


def gathering_folder(root: str, step: int, run_id: str) -> str:
    """The folder (or URL) into which the files of the checkpoint of ``step`` come. Where folders can be renamed, it gets the name
    of a checkpoint once all of them are there. An object store copies what it renames: there it has that name from the start."""
    folder = step_folder(root, step)
    return f"{folder}.{run_id}.partial" if is_local_url(root) else folder


def gathering_of(folder: str) -> tuple[int, str] | None:
    """The step, and the id of the run, of a `gathering_folder` of this name, without those above it; None: it is none."""
    match = _GATHERING.fullmatch(folder)
    return (int(match[1]), match[2]) if match else None


def marker_file(run_id: str, node: str = "") -> str:
    """The empty file by which the coordinator, or a node, marks the folder of a run's checkpoints, so that it is seen whether all
    reach the same one."""
    return f"run-{run_id}-{node}" if node else f"run-{run_id}"


def bucket_file(bucket: int, nonce: str) -> str:
    """The name of a bucket's file; its node draws the ``nonce`` (hex, NONCE_BYTES) for it. So nobody writes other content under a
    name that a manifest has, where the storage lets nobody overwrite."""
    return f"bucket-{bucket:05d}-{nonce}.safetensors"


def bucket_of(file: str) -> int | None:
    """The bucket of a file of this name; None: it is no bucket's. On a node's own disk, names have no nonce."""
    match = _BUCKET.fullmatch(file)
    return int(match[1]) if match else None
