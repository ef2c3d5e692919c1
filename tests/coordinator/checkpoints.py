"""Checkpoints as nodes write them, with three small buckets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from blake3 import blake3
from safetensors.numpy import save

from dtfm.coordinator.log.events import CheckpointFile
from dtfm.coordinator.service.checkpoint.checkpoint_folder import write_manifest
from dtfm.protos.checkpoint_names import bucket_file


def write_buckets(folder: Path, count: int = 3) -> list[CheckpointFile]:
    """The files without a manifest; bucket i holds the weight "layer.i"."""
    folder.mkdir(parents=True)
    written = []
    for i in range(count):
        moments = np.zeros(6, np.float32)
        weights = np.full((2, 3), i, np.float32)
        content = save(
            {f"layer.{i}": weights, "optimizer.exp_avg": moments, "optimizer.exp_avg_sq": moments}, {"format": "pt"}
        )
        digest = blake3(content).hexdigest()
        (folder / bucket_file(i, digest[:32])).write_bytes(content)
        written.append(CheckpointFile(len(content), digest, digest[:32]))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return written


def write_checkpoint(folder: Path) -> Path:
    """The folder of a whole checkpoint of step 5, within ``folder``."""
    target = folder / "step-00000005"
    write_manifest(target.as_uri(), {"name": "demo"}, "run-id", 5, write_buckets(target))
    return target
