"""A checkpoint's manifest, and what becomes of a checkpoint by export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file, save

from dtfm.coordinator.command import export as export_module
from dtfm.coordinator.command.export import export_checkpoint
from dtfm.coordinator.log.events import SnapshotPart
from dtfm.coordinator.log.manifest import CheckpointError, newest, read_manifest, step_folder, write_manifest


def write_buckets(folder: Path, count: int = 3) -> list[SnapshotPart]:
    """As nodes do it; bucket i holds the weight "layer.i"."""
    folder.mkdir(parents=True)
    written = []
    for i in range(count):
        moments = np.zeros(6, np.float32)
        weights = np.full((2, 3), i, np.float32)
        content = save(
            {f"layer.{i}": weights, "optimizer.exp_avg": moments, "optimizer.exp_avg_sq": moments}, {"format": "pt"}
        )
        name = f"bucket-{i:05d}.safetensors"
        (folder / name).write_bytes(content)
        written.append(SnapshotPart(len(content), blake3(content).hexdigest()))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return written


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "step-00000005"
    written = write_buckets(folder)
    write_manifest(folder.as_uri(), {"name": "demo"}, "run-id", 5, written)
    return folder


def test_a_manifest_names_every_bucket(checkpoint: Path) -> None:
    fields = json.loads((checkpoint / "manifest.json").read_text())
    assert (fields["format"], fields["run"], fields["run_id"], fields["step"]) == (1, {"name": "demo"}, "run-id", 5)
    assert [bucket["index"] for bucket in fields["buckets"]] == [0, 1, 2]
    assert set(fields["buckets"][0]) == {"index", "file", "bytes", "blake3"}
    manifest = read_manifest(checkpoint.as_uri())
    assert (manifest.step, manifest.run_id, len(manifest.buckets)) == (5, "run-id", 3)
    assert not list(checkpoint.glob("*.part"))


def test_a_missing_bucket_prevents_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000005"
    written = write_buckets(folder)
    (folder / "bucket-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="must name storage that all machines share"):
        write_manifest(folder.as_uri(), {}, "run-id", 5, written)
    assert not (folder / "manifest.json").exists()


def test_a_truncated_bucket_prevents_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000005"
    written = write_buckets(folder)
    (folder / "bucket-00001.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has 5 bytes, though its node wrote"):
        write_manifest(folder.as_uri(), {}, "run-id", 5, written)


def test_newest_finds_the_newest_whole_checkpoint(checkpoint: Path) -> None:
    uri = checkpoint.parent.as_uri()
    assert newest(uri) == step_folder(uri, 5) == checkpoint.as_uri()
    write_buckets(checkpoint.parent / "step-00000007")  # half-written
    (checkpoint.parent / "step-oops").mkdir()
    assert newest(uri) == checkpoint.as_uri()
    assert newest(f"{uri}/elsewhere") is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "holds no whole checkpoint"),
        ("{", "cannot be read"),
        ("[]", "malformed"),
        ('{"format": 2}', "has checkpoint format 2"),
        ('{"format": 1}', "malformed"),
        (
            '{"format": 1, "run": {}, "run_id": "x", "step": 1, '
            '"buckets": [{"index": 0, "file": "../../x", "bytes": 1, "blake3": ""}]}',
            "names files outside",
        ),
    ],
)
def test_an_unusable_manifest_is_refused_with_its_reason(checkpoint: Path, content: str | None, words: str) -> None:
    (checkpoint / "manifest.json").unlink()
    if content is not None:
        (checkpoint / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_manifest(checkpoint.as_uri())


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
    bucket = checkpoint / "bucket-00002.safetensors"
    content = bytearray(bucket.read_bytes())
    content[-1] ^= 1
    bucket.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        export_checkpoint(checkpoint.as_uri(), tmp_path / "model")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoints"]


def test_an_export_overwrites_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        export_checkpoint(checkpoint.as_uri(), tmp_path)
