"""What `dtfm-coordinator export` makes of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from numpy.typing import NDArray
from safetensors.numpy import load_file, save
from safetensors.torch import load_file as load_torch_file

from dtfm.coordinator.command.export import export
from dtfm.coordinator.command.weights import exporting
from dtfm.coordinator.command.weights.check import BucketCheck
from dtfm.coordinator.command.weights.exporting import NotTheLogs, export_checkpoint
from dtfm.coordinator.command.weights.formats import Format
from dtfm.coordinator.command.weights.stored import look_at
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.events import CheckpointFile
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.steps import Evaluated
from dtfm.coordinator.service.checkpoint.checkpoint_folder import write_manifest
from dtfm.coordinator.service.checkpoint.manifest import BucketFile, CheckpointError
from dtfm.coordinator.store.store import Store
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state.snapshot_files import file_header
from dtfm.protos.checkpoint_names import bucket_file
from tests.coordinator.checkpoints import write_buckets, write_checkpoint
from tests.coordinator.command.typed import Typed
from tests.coordinator.stores import store_url


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints")


def test_an_export_holds_only_the_weights_and_the_models_files(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    assert export_checkpoint(checkpoint.as_uri(), target) == 5
    assert sorted(file.name for file in target.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    tensors = load_file(target / "model.safetensors")
    assert {name: float(tensor[0, 0]) for name, tensor in tensors.items()} == {"layer.0": 0, "layer.1": 1, "layer.2": 2}
    assert sorted(file.name for file in target.parent.iterdir()) == ["model"]


def test_an_adapter_is_written_as_peft_names_it(tmp_path: Path) -> None:
    """At home as in an export, with the name of its model where others find that."""
    folder = tmp_path / "dtfm-runs" / "step-00000005"
    folder.mkdir(parents=True)
    names = [f"model.layers.{number}.self_attn.q_proj.lora_A.default.weight" for number in range(3)]
    files = []
    for index, name in enumerate(names):
        content = save({name: np.full((2, 3), index, np.float32)}, {"format": "pt"})
        digest = blake3(content).hexdigest()
        (folder / bucket_file(index, digest[:32])).write_bytes(content)
        files.append(CheckpointFile(len(content), digest, digest[:32], "ab" * 32))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "coordinator://disk/pretrained",
        "r": 3,
        "revision": "main",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    run = {"name": "demo", "model": {"pretrained": "coordinator:///runs/first"}, "adapter": {"rank": 2, "alpha": 4.0}}
    write_manifest(folder.as_uri(), run, "run-id", 5, files)
    target = tmp_path / "adapter"
    export_checkpoint(folder.as_uri(), target)
    assert sorted(file.name for file in target.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    for tensors in (load_file(each / "adapter_model.safetensors") for each in (folder, target)):
        assert {name: float(tensor[0, 0]) for name, tensor in tensors.items()} == {
            f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_A.weight": number for number in range(3)
        }
        written = json.loads((target / "adapter_config.json").read_text())
        assert (written["base_model_name_or_path"], written["r"], written["lora_alpha"]) == ("/runs/first", 2, 4)
        assert written["revision"] is None
    assert "AutoPeftModelForCausalLM" in (target / "README.md").read_text()


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


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_target_in_use_is_refused_in_one_line_and_nothing_is_touched(
    kind: str, checkpoint: Path, tmp_path: Path, typed: Typed
) -> None:
    target = tmp_path / "model"
    if kind == "folder":
        target.mkdir()
        (target / ".mine").write_text("mine")
    else:
        target.write_text("mine")
    before = everything_in(tmp_path)
    said = typed("export", str(target), "--checkpoint", checkpoint.as_uri(), code=2)
    assert said.strip().splitlines() == [
        f"dtfm-coordinator: {target} exists and is not an empty folder; give a new one"
    ]
    assert everything_in(tmp_path) == before


def test_an_empty_folder_may_be_the_target(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert export_checkpoint(checkpoint.as_uri(), tmp_path / "model") == 5


def test_an_export_may_have_another_format_which_its_config_says_too(
    checkpoint: Path, tmp_path: Path, typed: Typed
) -> None:
    settings = {
        "model_type": "llama",
        "dtype": "float32",
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32"},
    }
    (checkpoint / "config.json").write_text(json.dumps(settings))
    for name, torch_name in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        target = tmp_path / name
        said = typed("export", str(target), "--checkpoint", checkpoint.as_uri(), "--dtype", name, "--json")
        assert json.loads(said)["infinite"] == 0
        config = json.loads((target / "config.json").read_text())
        assert config["dtype"] == config["torch_dtype"] == config["text_config"]["dtype"] == torch_name
        tensors = load_torch_file(target / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, torch_name)}
        assert [float(tensors[f"layer.{number}"].sum()) for number in range(3)] == [0, 6, 12]
        assert f"dtfm-coordinator export --dtype {name} DIR" in (target / "README.md").read_text()
    typed("export", str(tmp_path / "other"), "--checkpoint", checkpoint.as_uri(), "--dtype", "int8", code=2)


def test_numbers_that_are_too_large_for_the_format_are_said(tmp_path: Path, typed: Typed) -> None:
    parts = write_buckets(tmp_path / "step-00000005", 1)
    content = save({"layer.1": np.array([1e6, 1], np.float32)})
    digest = blake3(content).hexdigest()
    (tmp_path / "step-00000005" / bucket_file(1, digest[:32])).write_bytes(content)
    parts.append(CheckpointFile(len(content), digest, digest[:32]))
    place = (tmp_path / "step-00000005").as_uri()
    write_manifest(place, {"name": "demo"}, "run-id", 5, parts)
    typed("export", str(tmp_path / "model"), "--checkpoint", place, "--dtype", "fp16")
    assert "1 numbers in 1 tensors (layer.1 is the first) are too large for fp16" in typed.err


def test_constants_come_along_and_take_no_parameters_place(checkpoint: Path, tmp_path: Path) -> None:
    constants: dict[str, NDArray[Any]] = {"layer.1": np.full((2, 3), 9, np.float32), "steps": np.array([5], np.int64)}
    (checkpoint / "buffers.safetensors").write_bytes(save(constants))
    export_checkpoint(checkpoint.as_uri(), tmp_path / "model", wanted=Format.BF16)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())["weight_map"]
    assert index["layer.1"] != index["steps"]
    assert load_torch_file(tmp_path / "model" / index["steps"]).keys() == {"steps"}
    assert sorted(index) == ["layer.0", "layer.1", "layer.2", "steps"]


def test_the_model_card_says_what_the_log_knows(checkpoint: Path, tmp_path: Path) -> None:
    ledger = log_of(checkpoint, ())
    run = {"name": "mine", "model": {"pretrained": "/home/jo/base"}, "data": {"source": "/home/jo/texts/*.txt"}}
    held_out = Evaluated(step=5, loss=2.5, samples=8, unigram_entropy=3.0)
    export_checkpoint(checkpoint.as_uri(), tmp_path / "model", replace(ledger, run=run, evaluated=held_out))
    card = (tmp_path / "model/README.md").read_text()
    digest = blake3((tmp_path / "model/model.safetensors").read_bytes()).hexdigest()
    for line in (
        "# mine",
        "| Held-out loss after step 5 | 2.5000 nats per token |",
        f"| Checkpoint | manifest BLAKE3 `{blake3((checkpoint / 'manifest.json').read_bytes()).hexdigest()}` |",
        f"| model.safetensors | BLAKE3 `{digest}` |",
    ):
        assert line in card.splitlines()
    assert "/home" not in card
    assert str(tmp_path) not in card


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


@pytest.mark.parametrize("muons", [(), ("z.weight",), ("z.weight", "a.bias", "scale")])
def test_the_digest_of_a_file_is_that_which_nodes_take_of_its_state(muons: Sequence[str]) -> None:
    parameters = (("z.weight", (3, 4)), ("a.bias", (3,)), ("scale", ()))
    spec = BucketSpec(2, (2,), parameters, orthogonal=frozenset(muons))
    bucket = Bucket(spec, torch.device("cpu"), torch.float32)
    for number, tensor in enumerate(bucket.state):
        tensor.copy_(torch.arange(len(tensor)) + number)
    content = file_header(spec, torch.float32) + bytes(bucket.read())
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/bucket", content)
    file = BucketFile(2, "bucket", len(content), blake3(content).hexdigest())
    for size in (1, 7, 4096):
        check = BucketCheck(look_at(filesystem, "/bucket", len(content)), file, bucket.digests()[0].hex())
        for at in range(0, len(content), size):
            check.add(content[at : at + size])
        check.add(b"")
        assert check.state == bucket.digests()[0].hex()
    with pytest.raises(CheckpointError, match="is damaged"):
        BucketCheck(look_at(filesystem, "/bucket", len(content)), file, "").add(b"")
