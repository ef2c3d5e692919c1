"""The adapter that a new run begins with: what follows from its folder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtfm.coordinator.service.begun_from import begun_from
from dtfm.coordinator.service.checkpoint.disk import Disk, Forbidden
from dtfm.protos.run_file.run_file import RunFile, parse_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "owner/base",
    "revision": COMMIT,
    "r": 8,
    "lora_alpha": 32,
    "target_modules": ["v_proj", "q_proj"],
    "use_rslora": True,
    "bias": "none",
}


def adapter_in(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    return folder


def begun(tables: dict[str, Any]) -> RunFile:
    """The run as the log has it."""
    run = parse_run(tables, "the run file")
    return parse_run(run.model_dump(mode="json") | begun_from(run), "the log")


def test_the_model_and_all_else_follow_from_an_adapter(tmp_path: Path) -> None:
    more = {"modules_to_save": ["lm_head", "embed_tokens"], "lora_dropout": 0.05, "use_dora": True}
    folder = adapter_in(tmp_path / "adapter", **more)
    run = begun({"model": {"pretrained": str(folder), "weights": "nf4"}, "adapter": {}})
    sent = run.message("").model
    assert (sent.pretrained, sent.weights) == (f"owner/base@{COMMIT}", "nf4")
    assert (sent.adapter.rank, sent.adapter.alpha, sent.adapter.rs) == (8, 32, True)
    assert list(sent.adapter.targets) == ["q_proj", "v_proj"]
    assert list(sent.adapter.train_also) == ["embed_tokens", "lm_head"]
    assert (sent.adapter.dropout, sent.adapter.dora) == (0.05, True)
    assert begun({"model": {"pretrained": str(folder)}, "adapter": {"dropout": 0.1}}).adapter.dropout == 0.1  # type: ignore[union-attr]
    assert sent.adapter.pretrained == "coordinator://disk/adapter"
    assert run.message("").data.tokenizer == "owner/base"
    assert run.own_adapter == folder
    disk = Disk(tmp_path, run.own_weights, run.own_adapter)
    assert disk.get("adapter/adapter_model.safetensors", 0, 9) == b"x"
    with pytest.raises(Forbidden):
        disk.get("pretrained/config.json", 0, 9)


def test_nodes_read_the_adapter_alone_of_its_folder(tmp_path: Path) -> None:
    """It may be any folder of the owner's."""
    folder = adapter_in(tmp_path / "adapter")
    (folder / "training_args.bin").write_bytes(b"secret")
    disk = Disk(tmp_path, None, folder)
    assert [each.path for each in disk.look("adapter")] == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    ]
    for read in (disk.look, lambda path: disk.get(path, 0, 9)):
        with pytest.raises(FileNotFoundError):
            read("adapter/training_args.bin")


def test_an_adapter_that_no_run_can_train_is_refused_by_its_own_name(tmp_path: Path) -> None:
    folder = adapter_in(tmp_path / "adapter", r=5000)
    with pytest.raises(ValueError, match=r"adapter.pretrained: the adapter in .*/adapter has rank = 5000 \(.*4096\)"):
        begun({"model": {"pretrained": str(folder)}, "adapter": {}})


def test_a_model_may_be_named_beside_it(tmp_path: Path) -> None:
    folder = adapter_in(tmp_path / "adapter")
    run = begun({"model": {"pretrained": "copies/base"}, "adapter": {"pretrained": str(folder), "rank": 8}})
    assert run.model.pretrained == "copies/base"
    assert run.own_adapter == folder


def test_so_does_another_runs_whose_model_is_on_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would not find that model by its path."""
    monkeypatch.chdir(tmp_path)
    folder = adapter_in(tmp_path / "dtfm-runs/first/step-00000004", base_model_name_or_path="/runs/base", revision=None)
    earlier = {
        "model": {"pretrained": "coordinator:///runs/base"},
        "adapter": {"rank": 8},
        "data": {"tokenizer": "gpt2"},
    }
    buckets = [{"index": 0, "file": "bucket-00000.safetensors", "bytes": 1, "blake3": "ab", "moments": "ab"}]
    manifest = {"format": 1, "run": earlier, "run_id": "1", "step": 4, "buckets": buckets}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    run = begun({"model": {"pretrained": "dtfm-runs/first"}, "adapter": {}})
    assert (run.own_weights, run.own_adapter) == (Path("/runs/base"), folder)
    assert run.data.tokenizer == "gpt2"


@pytest.mark.parametrize(
    ("adapter", "changes", "complaint"),
    [
        ({"rank": 16}, {}, r"adapter.rank = 16, but the adapter in .* has 8; leave rank out, or begin a new adapter"),
        ({"alpha": 8.0}, {}, r"adapter.alpha = 8.0, but the adapter in .* has 32.0"),
        ({"rs": False}, {}, r"adapter.rs = false, but the adapter in .* has true"),
        ({"dora": True}, {}, r"adapter.dora = true, but the adapter in .* has false; leave dora out"),
        (
            {"targets": ["q_proj"]},
            {},
            r'adapter.targets = \["q_proj"\], but the adapter in .* has \["q_proj", "v_proj"\]',
        ),
        ({}, {"peft_type": "IA3"}, "of the kind 'IA3'; only LoRA can be trained further"),
        ({}, {"modules_to_save": "lm_head"}, "has modules_to_save = 'lm_head', which is no list of names"),
        (
            {"train_also": ["norm"]},
            {"modules_to_save": ["lm_head"]},
            r'adapter.train_also = \["norm"\], but the adapter in .* has \["lm_head"\]; leave train_also out',
        ),
        ({}, {"bias": "all"}, "has bias = 'all', which runs do not train"),
        ({}, {"target_modules": ".*q_proj"}, "names its targets by a pattern"),
        ({}, {"base_model_name_or_path": None}, "does not say beside which model it stands"),
        ({"pretrained": "owner/adapter"}, {}, "is an adapter, and adapter.pretrained names another"),
    ],
)
def test_what_does_not_fit_is_told(
    tmp_path: Path, adapter: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    folder = adapter_in(tmp_path / "adapter", **changes)
    with pytest.raises(ValueError, match=complaint):
        begun({"model": {"pretrained": str(folder)}, "adapter": adapter})


def test_an_adapter_of_others_opens_no_folder_of_this_disk_to_nodes(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    place = f"coordinator://{tmp_path}/keys"
    named = adapter_in(tmp_path / "one", base_model_name_or_path=place, revision=None)
    earlier = {"model": {"pretrained": place}, "adapter": {"rank": 8}}
    buckets = [{"index": 0, "file": "bucket-00000.safetensors", "bytes": 1, "blake3": "ab", "moments": "ab"}]
    manifest = {"format": 1, "run": earlier, "run_id": "1", "step": 4, "buckets": buckets}
    of_a_run = adapter_in(tmp_path / "other")
    (of_a_run / "manifest.json").write_text(json.dumps(manifest))
    for folder in (named, of_a_run):
        with pytest.raises(ValueError, match="a folder on this disk that is no checkpoint"):
            begun({"model": {"pretrained": str(folder)}, "adapter": {}})


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    folder = adapter_in(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"is an adapter; add a table \[adapter\] .*export --merged DIR writes"):
        begun({"model": {"pretrained": str(folder)}})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"adapter.pretrained: .*/empty has no adapter_config.json"):
        begun({"model": {"pretrained": "owner/base"}, "adapter": {"pretrained": str(tmp_path / "empty")}})
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model.safetensors; copy it again, or if it is a checkpoint"):
        begun({"model": {"pretrained": str(folder)}, "adapter": {}})
