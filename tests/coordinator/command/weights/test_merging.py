"""`dtfm-coordinator export --merged`: a model and its adapter as one model, as peft merges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dtfm.coordinator.command.weights import exporting
from dtfm.coordinator.command.weights.exporting import NotTheLogs, export_checkpoint, export_merged
from dtfm.coordinator.command.weights.formats import Format
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.events import CheckpointFile
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.run import Described
from dtfm.coordinator.service.checkpoint.checkpoint_folder import write_manifest
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError
from dtfm.node.data.samples import Sample
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.node.state.snapshot_files import file_header
from dtfm.protos.checkpoint_names import bucket_file
from dtfm.protos.run_file.run_file import parse_run
from dtfm.scheduler.model.workload import Layer, Workload
from tests.coordinator.checkpoints import write_checkpoint
from tests.coordinator.command.typed import Typed
from tests.published import publish

SAMPLE = Sample((12,), torch.int64, 256)
TORCH = {Format.BF16: torch.bfloat16, Format.FP16: torch.float16, Format.FP32: torch.float32}


def trained(folder: Path, published: Path, also: tuple[str, ...] = (), **keys: Any) -> tuple[Path, Model]:
    """The checkpoint of step 5 of a run that has trained an adapter beside the published model, and ``also`` these modules, of
    random numbers; and its model. ``keys``: of its table [adapter]."""
    adapter = {"rank": 4, "alpha": 6.0, "train_also": list(also), **keys}
    run = {"model": {"pretrained": str(published)}, "adapter": adapter}
    model = load_model(parse_run(run, "the test").message("").model, SAMPLE)
    random = np.random.default_rng(5)
    checkpoint = folder / "step-00000005"
    checkpoint.mkdir(parents=True)
    files = []
    for spec in model.buckets:
        header = file_header(spec, torch.float32, weights=True)
        content = header + (random.standard_normal(spec.size) * 0.2).astype("<f4").tobytes()
        digest = blake3(content).hexdigest()
        (checkpoint / bucket_file(spec.index, digest[:32])).write_bytes(content)
        files.append(CheckpointFile(len(content), digest, digest[:32], "ab" * 32))
    model.save_config(checkpoint, torch.float32, {})
    (checkpoint / "tokenizer.json").write_text("{}")
    write_manifest(checkpoint.as_uri(), run, "run-id", 5, files)
    return checkpoint, model


@pytest.mark.parametrize(
    ("family", "dora"),
    [
        ("gpt2", False),
        ("qwen3", True),
        pytest.param("qwen3", False, marks=pytest.mark.soak),
        pytest.param("gpt2", True, marks=pytest.mark.soak),
    ],
)
def test_it_is_what_peft_merges_to_a_rounding(
    family: str, dora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where matrices are transposed, as GPT-2's are, and whatever the pieces in which files come."""
    module: Any = AutoModelForCausalLM.from_pretrained(publish(tmp_path / "made", family)).to(torch.bfloat16)
    published = tmp_path / "published"
    module.save_pretrained(published, max_shard_size="20KB")
    checkpoint, _ = trained(tmp_path / "run", published, dora=dora)
    export_checkpoint(checkpoint.as_uri(), tmp_path / "adapter")
    monkeypatch.setattr("dtfm.coordinator.command.weights.stored.PIECE_BYTES", 1001)
    monkeypatch.setattr("dtfm.coordinator.command.weights.merging.PIECE_BYTES", 1001)
    monkeypatch.setattr(exporting, "SHARD_BYTES", 30_000)
    for wanted in (None, *TORCH):
        dtype = TORCH[wanted] if wanted is not None else torch.bfloat16
        target = tmp_path / f"merged-{wanted}"
        export_merged(checkpoint.as_uri(), target, wanted=wanted)
        found: Any = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        assert found.dtype == dtype
        whole: Any = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
        beside: Any = PeftModel.from_pretrained(whole, str(tmp_path / "adapter"))
        right = beside.merge_and_unload().to(dtype).state_dict()
        step = torch.finfo(dtype).eps
        for name, value in found.state_dict().items():
            torch.testing.assert_close(value, right[name], rtol=step, atol=1e-6)
    assert {"tokenizer.json", "generation_config.json", "model.safetensors.index.json"} <= {
        each.name for each in target.iterdir()
    }
    assert not (target / "adapter_config.json").exists()
    card = (target / "README.md").read_text()
    assert "AutoModelForCausalLM" in card
    assert "AutoPeft" not in card
    assert "dtfm-coordinator export --merged --dtype fp32 DIR" in card
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith(".")) == []


@pytest.mark.parametrize(
    ("family", "also"),
    [
        ("llama", ("embed_tokens", "lm_head", "norm")),
        pytest.param("gemma2", ("embed_tokens",), marks=pytest.mark.soak),
        ("gpt2", ("wte",)),
    ],
)
def test_modules_that_were_trained_whole_are_read_by_peft_and_merged(
    family: str, also: tuple[str, ...], tmp_path: Path
) -> None:
    """The heads of gemma2 and gpt2 are their embeddings: peft has each under both names, and the model once."""
    published = publish(tmp_path / "published", family)
    checkpoint, model = trained(tmp_path / "run", published, also)
    export_checkpoint(checkpoint.as_uri(), tmp_path / "adapter")
    export_merged(checkpoint.as_uri(), tmp_path / "merged")
    exported = load_file(tmp_path / "adapter/adapter_model.safetensors")
    at_home = load_file(checkpoint / "adapter_model.safetensors")
    assert exported.keys() == at_home.keys()
    assert all(torch.equal(value, at_home[name]) for name, value in exported.items())
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["modules_to_save"][: len(also)] == [*also]
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids, logits = torch.arange(24).view(2, 12), []
    for folder in (tmp_path / "adapter", checkpoint):
        whole: Any = AutoModelForCausalLM.from_pretrained(published)
        beside: Any = PeftModel.from_pretrained(whole, str(folder))
        found = {name: value for name, value in beside.named_parameters() if ".modules_to_save." in name}
        assert len(found) == sum(".lora_" not in name for spec in model.buckets for name, _ in spec.parameters)
        for name, value in found.items():
            assert torch.equal(value, exported[name.replace(".modules_to_save.default.", ".")])
        logits.append(beside(ids).logits)
    assert torch.equal(*logits)
    torch.testing.assert_close(merged(ids).logits, logits[0], rtol=1e-4, atol=1e-4)
    assert merged.lm_head.weight is merged.get_input_embeddings().weight or family == "llama"


def test_a_model_without_the_first_part_of_its_names_is_merged_too(tmp_path: Path) -> None:
    """As GPT-2 lies on the hub."""
    published = publish(tmp_path / "published", "gpt2")
    tensors = load_file(published / "model.safetensors")
    short = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    save_file(short, published / "model.safetensors", metadata={"format": "pt"})
    checkpoint, _ = trained(tmp_path / "run", published)
    export_merged(checkpoint.as_uri(), tmp_path / "merged")
    found = load_file(tmp_path / "merged/model.safetensors")
    changed = [name for name, value in found.items() if not torch.equal(value, tensors[f"transformer.{name}"])]
    assert len(changed) == 3 * 4
    assert "h.0.attn.c_attn.weight" in changed


def log_of(checkpoint: Path, model: Model) -> Ledger:
    """The log of a run whose nodes have read the model's files."""
    manifest = (checkpoint / "manifest.json").read_bytes()
    written = ev.CheckpointWritten(5, checkpoint.as_uri(), blake3(manifest).hexdigest())
    described = Described(
        Workload((Layer("layer", 1.0, 1.0, 1.0),), 1), "ab", 1, 1, 0.0, 1, 5, model.weights_fingerprint(1).hex()
    )
    return fold([ev.RunStarted("run-id", json.loads(manifest)["run"]), ev.RunDescribed(described), written])


@pytest.mark.parametrize("part", ["config.json", "model.safetensors"])
def test_a_model_that_differs_from_the_nodes_is_refused(part: str, tmp_path: Path) -> None:
    published = publish(tmp_path / "published")
    checkpoint, model = trained(tmp_path / "run", published)
    ledger = log_of(checkpoint, model)
    export_merged(checkpoint.as_uri(), tmp_path / "merged", ledger)
    content = (published / part).read_bytes()
    (published / part).write_bytes(content + b" " if part == "config.json" else content[:-4096] + bytes(4096))
    with pytest.raises(NotTheLogs, match="are not those beside which the run has trained its adapter"):
        export_merged(checkpoint.as_uri(), tmp_path / "again", ledger)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["merged", "published", "run"]


def test_where_the_model_cannot_be_read_it_is_said_where_the_command_can(tmp_path: Path, typed: Typed) -> None:
    published = publish(tmp_path / "published")
    checkpoint, _ = trained(tmp_path / "run", published)
    published.rename(tmp_path / "elsewhere")
    said = typed("export", str(tmp_path / "merged"), "--merged", "--checkpoint", checkpoint.as_uri(), code=2)
    assert said.strip().splitlines()[-1] == (
        f"dtfm-coordinator: model.pretrained is '{published}', which this machine cannot read (there is no {published}). Run the "
        "command where the model is, as on a node's machine: dtfm-coordinator export --merged DIR INVITATION"
    )


def test_a_run_that_trains_all_weights_has_nothing_to_merge(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"^--merged is for runs with \[adapter\]"):
        export_merged(checkpoint.as_uri(), tmp_path / "merged")


def test_an_adapter_for_another_model_is_refused(tmp_path: Path) -> None:
    published = publish(tmp_path / "published")
    checkpoint, _ = trained(tmp_path / "run", published)
    publish(published, hidden_size=48)
    with pytest.raises(CheckpointError, match=r"has a tensor of shape \[48, 48\] for the adapter's model.layers.0"):
        export_merged(checkpoint.as_uri(), tmp_path / "merged")
    publish(published, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"has no tensor for the adapter's model.layers.2.*merge_and_unload"):
        export_merged(checkpoint.as_uri(), tmp_path / "merged")
