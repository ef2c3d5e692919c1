"""What `dtfm-coordinator export` makes of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dtfm.coordinator.command import export as export_module
from dtfm.coordinator.command.export import export_checkpoint
from dtfm.coordinator.log.manifest import CheckpointError
from tests.coordinator.checkpoints import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints")


def test_an_export_holds_only_the_weights_and_the_models_files(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    assert export_checkpoint(checkpoint.as_uri(), target) == 5
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(target / "model.safetensors")
    assert {name: float(tensor[0, 0]) for name, tensor in tensors.items()} == {"layer.0": 0, "layer.1": 1, "layer.2": 2}
    assert sorted(file.name for file in target.parent.iterdir()) == ["model"]


def test_a_large_export_is_cut_into_indexed_files(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", 40)
    export_checkpoint(checkpoint.as_uri(), tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 72
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "model" / file)
    assert len(set(index["weight_map"].values())) == 2


def test_a_damaged_bucket_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    (bucket,) = checkpoint.glob("bucket-00002-*")
    content = bytearray(bucket.read_bytes())
    content[-1] ^= 1
    bucket.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        export_checkpoint(checkpoint.as_uri(), tmp_path / "model")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoints"]


def test_an_export_overwrites_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        export_checkpoint(checkpoint.as_uri(), tmp_path)
