"""What `dtfm-coordinator export` makes of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.numpy import load_file, save

from dtfm.coordinator.command import exporting
from dtfm.coordinator.command.export import export
from dtfm.coordinator.command.exporting import NotTheLogs, export_checkpoint
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.events import CheckpointFile
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.service.checkpoint_folder import CheckpointError, write_manifest
from dtfm.coordinator.store.store import Store
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state.snapshot_files import file_header
from dtfm.protos.checkpoint_names import bucket_file
from tests.coordinator.checkpoints import write_buckets, write_checkpoint
from tests.coordinator.stores import store_url


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
    monkeypatch.setattr(exporting, "SHARD_BYTES", 40)
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


def test_where_nothing_can_be_written_that_is_said(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"cannot export .* to {tmp_path}/file/model"):
        export_checkpoint(checkpoint.as_uri(), tmp_path / "file" / "model")


def log_of(checkpoint: Path, agreed: Iterable[str]) -> Ledger:
    """What the log says of the checkpoint, and of its state by bucket."""
    digest = blake3((checkpoint / "manifest.json").read_bytes()).hexdigest()
    written = ev.CheckpointWritten(5, checkpoint.as_uri(), digest)
    return fold([ev.RunStarted("run-id", {}), written, ev.StateAgreed(5, tuple(agreed))])


def state_of(number: int) -> str:
    """The digest of the state of bucket ``number`` (see tests/coordinator/checkpoints.py)."""
    tensors = [np.full((2, 3), number, np.float32), np.zeros(6, np.float32), np.zeros(6, np.float32)]
    return blake3(b"".join(blake3(tensor.tobytes()).digest() for tensor in tensors)).hexdigest()


def test_a_checkpoint_as_the_log_says_it_is_is_exported(checkpoint: Path, tmp_path: Path) -> None:
    assert export_checkpoint(checkpoint.as_uri(), tmp_path / "all", log_of(checkpoint, map(state_of, range(3)))) == 5
    assert export_checkpoint(checkpoint.as_uri(), tmp_path / "some", log_of(checkpoint, ["", state_of(1), ""])) == 5


def test_a_manifest_that_the_log_does_not_name_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    ledger = log_of(checkpoint, ())
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"demo"', '"other"'))
    with pytest.raises(NotTheLogs, match="is not the one that the log names"):
        export_checkpoint(checkpoint.as_uri(), tmp_path / "model", ledger)


def test_a_checkpoint_of_another_run_or_step_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    for ledger in (Ledger(run_id="run-id"), replace(log_of(checkpoint, ()), run_id="another")):
        with pytest.raises(NotTheLogs, match="names no checkpoint of step 5"):
            export_checkpoint(checkpoint.as_uri(), tmp_path / "model", ledger)


def test_state_that_its_writer_has_made_up_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(NotTheLogs, match=r"bucket-00001.*not the state that its trainers agreed on"):
        export_checkpoint(checkpoint.as_uri(), tmp_path / "model", log_of(checkpoint, ["", state_of(2), ""]))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoints"]


def test_a_tensor_that_two_buckets_have_is_not_exported_for_either(checkpoint: Path, tmp_path: Path) -> None:
    """The digests of states do not cover names: a writer can give its tensor another's."""
    parts = write_buckets(tmp_path / "other")
    content = save({"layer.0": np.ones((2, 3), np.float32)})
    digest = blake3(content).hexdigest()
    (tmp_path / "other" / bucket_file(2, digest[:32])).write_bytes(content)
    parts[2] = CheckpointFile(len(content), digest, digest[:32])
    write_manifest((tmp_path / "other").as_uri(), {"name": "demo"}, "run-id", 5, parts)
    with pytest.raises(CheckpointError, match=r"bucket-00002.* and bucket-00000.* both have a tensor 'layer.0'"):
        export_checkpoint((tmp_path / "other").as_uri(), tmp_path / "model")


def test_who_exports_without_a_log_is_told_once_that_nothing_was_checked(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(tmp_path / "model", checkpoint=checkpoint.as_uri())
    assert capsys.readouterr().err.count("was not checked against a log") == 1


def test_who_names_a_checkpoint_and_a_log_has_it_checked(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = store_url(tmp_path)
    digest = blake3((checkpoint / "manifest.json").read_bytes()).hexdigest()
    with Store(url, write=True) as store:
        store.append([ev.RunStarted("run-id", {}), ev.CheckpointWritten(5, checkpoint.as_uri(), digest)])
    export(tmp_path / "model", checkpoint=checkpoint.as_uri(), store=url)
    assert "does not have the digests of all state" in capsys.readouterr().err
    with Store(url, write=True) as store:
        store.append([ev.StateAgreed(5, (state_of(2),) * 3)])
    with pytest.raises(NotTheLogs):
        export(tmp_path / "again", store=url)


def test_the_digest_of_a_file_is_that_which_nodes_take_of_its_state() -> None:
    spec = BucketSpec(2, (2,), (("z.weight", (3, 4)), ("a.bias", (3,)), ("scale", ())))
    bucket = Bucket(spec, torch.device("cpu"), torch.float32)
    for number, tensor in enumerate(bucket.state):
        tensor.copy_(torch.arange(spec.size) + number)
    content = file_header(spec, torch.float32) + bytes(bucket.read())
    assert exporting._state_digest(content, moments="") == bucket.digests()[0].hex()
