"""`plan --run RUN.toml`: no WORKLOAD.json, and no torch, where a configuration says how large the model is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from dtfm.coordinator.command.planning.run_workload import as_begun, workload_of_run
from dtfm.node.command.workload_file import describe
from dtfm.protos.run_file.run_file import RunFile, parse_run, read_run_file
from dtfm.scheduler.formats.workload import parse_workload
from tests.coordinator.command.typed import Typed
from tests.hub import REPOSITORY, TOKEN, hub as hub_of
from tests.published import publish
from tests.scheduler.clusters import even_workload
from tests.scheduler.dumps import dump_workload

EIGHT_BILLION = {
    **{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128},
    **{"num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936},
}
GPUS = "plan", "--gpus", "L4", "--links", "1Gbit/s,20ms"


def run_file(**tables: dict[str, object]) -> RunFile:
    return parse_run(tables, "run.toml")


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {
            "train": {
                "precision": "bf16",
                "micro_batch": 2,
                "activation_checkpointing": "layer",
                "optimizer_state": "host",
            },
        },
    ],
)
def test_a_run_asks_what_a_node_would_count(tables: dict[str, dict[str, object]]) -> None:
    """Compares all but the memory that layers work with. Its sums may be 1 % off:
    tests/node/model/test_language_model_sums.py."""
    asked = run_file(**tables)
    counted = parse_workload(describe(asked.with_precision(bf16=False)))[0]
    summed = workload_of_run(asked)
    for layer, same in zip(summed.layers, counted.layers, strict=True):
        assert (layer.forward_flops, layer.parameter_bytes, layer.kept) == (
            same.forward_flops,
            same.parameter_bytes,
            same.kept,
        )
    for field in ("micro_batches", "checkpointing", "optimizer_state"):
        assert getattr(summed, field) == getattr(counted, field)
    assert summed.copy_bytes_per_parameter_byte == counted.copy_bytes_per_parameter_byte


def test_a_folder_with_a_config_says_how_large_its_model_is(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 500}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": 1})
    )
    summed = workload_of_run(run_file(model={"pretrained": str(tmp_path)}))
    named = workload_of_run(run_file(model={"family": config.pop("model_type"), "config": config}))
    assert summed.layers == named.layers
    assert summed.layers[0].parameter_bytes == 4 * 500 * 64


@pytest.mark.parametrize(
    ("also", "targets"), [([], "all-linear"), (["lm_head"], "all-linear"), (["lm_head"], ["q_proj", "v_proj"])]
)
def test_a_run_with_an_adapter_asks_what_a_node_would_count(
    tmp_path: Path, also: list[str], targets: str | list[str]
) -> None:
    """Also where the head is the embedding, and is trained, and where only some matrices have an adapter."""
    published = publish(tmp_path, "qwen3", tie_word_embeddings=bool(also))
    model: dict[str, object] = {"pretrained": str(published), "weights": "nf4"}
    adapter = {"rank": 4, "train_also": also, "targets": targets}
    asked = run_file(model=model, adapter=adapter, data={"tokenizer": "bytes"})
    counted = parse_workload(describe(asked.with_precision(bf16=False)))[0]
    summed = workload_of_run(asked)
    assert summed.backward_per_forward == pytest.approx(counted.backward_per_forward)
    for field in ("forward_flops", "parameter_bytes", "frozen_bytes", "kept"):
        assert [getattr(layer, field) for layer in summed.layers] == [getattr(layer, field) for layer in counted.layers]


PUBLISHED_ADAPTER = {
    "peft_type": "LORA",
    "base_model_name_or_path": "owner/base",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "r": 8,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "modules_to_save": ["lm_head"],
    "bias": "none",
}


def adapter_in(folder: Path, **changes: object) -> Path:
    """A folder as peft writes it."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(PUBLISHED_ADAPTER | changes))
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the Hugging Face hub."""
    files = fsspec.filesystem("dir", path=str(tmp_path / "hub"), fs=fsspec.filesystem("file"))
    monkeypatch.setattr("dtfm.coordinator.command.planning.run_workload.fsspec.filesystem", lambda _: files)
    return tmp_path / "hub"


def planned(text: str, tmp_path: Path, typed: Typed, code: int = 0) -> str:
    (tmp_path / "run.toml").write_text(text)
    return typed(*GPUS, "--run", str(tmp_path / "run.toml"), "--deadline", "0.1", "--json", code=code)


def test_a_folder_of_peft_says_which_model_and_which_adapter(tmp_path: Path, hub: Path, typed: Typed) -> None:
    """As `serve` reads it. The commit of the model is the adapter's."""
    base = hub / f"owner/base@{PUBLISHED_ADAPTER['revision']}"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(EIGHT_BILLION))
    folder = adapter_in(tmp_path / "adapter")
    model: dict[str, object] = {"pretrained": str(folder), "weights": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
    named = run_file(model=model | {"pretrained": str(tmp_path)}, adapter={"rank": 8, "train_also": ["lm_head"]})
    assert workload_of_run(as_begun(run_file(model=model, adapter={}))) == workload_of_run(named)
    text = f'[model]\npretrained = "{folder}"\nweights = "nf4"\n'
    assert json.loads(planned(f"{text}[adapter]\n", tmp_path, typed))["plan"] is not None
    assert "adapter.rank = 4, but the adapter in" in planned(f"{text}[adapter]\nrank = 4\n", tmp_path, typed, code=2)


def test_so_does_another_run_of_this_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model's folder may be one of this disk, which others do not find."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(EIGHT_BILLION))
    folder = adapter_in(tmp_path / "dtfm-runs/first/step-00000004", revision=None)
    buckets = [{"index": 0, "file": "bucket-00000.safetensors", "bytes": 1, "blake3": "ab", "moments": "ab"}]
    before = {"model": {"pretrained": str(tmp_path / "base")}, "adapter": {"rank": 8}}
    manifest = {"format": 1, "run": before, "run_id": "1", "step": 4, "buckets": buckets}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    config = PUBLISHED_ADAPTER | {"base_model_name_or_path": str(tmp_path / "base"), "revision": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    found = workload_of_run(as_begun(run_file(model={"pretrained": "dtfm-runs/first"}, adapter={})))
    assert len(found.layers) == 2 + 36


def test_an_adapter_on_the_hub_in_place_of_its_model_is_told_how_to_be_named(
    tmp_path: Path, hub: Path, typed: Typed
) -> None:
    """The coordinator does not read it there, and nodes would refuse it."""
    adapter_in(hub / "owner/adapter", target_modules=["q_proj"])
    told = planned('[model]\npretrained = "owner/adapter"\n[adapter]\n', tmp_path, typed, code=2)
    assert told == (
        "dtfm-coordinator: model.pretrained is 'owner/adapter', an adapter: name its model as model.pretrained "
        "('owner/base@0123456789abcdef0123456789abcdef01234567'), and in [adapter] set pretrained = \"owner/adapter\", rank = 8, "
        'alpha = 32.0, targets = ["q_proj"], train_also = ["lm_head"]\n'
    )


BEGUN = '[model]\npretrained = "owner/base"\n[adapter]\npretrained = "owner/adapter"\n'
SAME = 'rank = 8\nalpha = 32\ntrain_also = ["lm_head"]\n'


@pytest.mark.parametrize(
    ("changes", "keys", "sentence"),
    [
        ({}, SAME, ""),
        ({"target_modules": "all-linear"}, SAME, ""),
        ({"target_modules": ["q_proj"]}, f'{SAME}targets = ["q_proj"]\n', ""),
        (
            {},
            SAME.replace("8", "16"),
            "adapter.rank = 16, but the adapter in owner/adapter has 8; set rank = 8 in [adapter]",
        ),
        ({"r": 4}, "", "adapter.rank = 16, but the adapter in owner/adapter has 4; set rank = 4 in [adapter]"),
        ({"use_dora": True}, SAME, "adapter.dora = false, but the adapter in owner/adapter has true; set dora = true"),
        (
            {"target_modules": ["q_proj"]},
            f'{SAME}targets = ["v_proj"]\n',
            'adapter.targets = ["v_proj"], but the adapter in owner/adapter has ["q_proj"]; set targets = ["q_proj"] in [ad',
        ),
        (
            {"modules_to_save": None},
            SAME,
            'adapter.train_also = ["lm_head"], but the adapter in owner/adapter has []; set train_also = [] in [adapter]',
        ),
        (
            {"base_model_name_or_path": "owner/other"},
            SAME,
            "adapter.pretrained: owner/adapter is an adapter for another model, owner/other; set model.pretrained to that, or",
        ),
        (
            {"peft_type": "IA3"},
            SAME,
            "adapter.pretrained: owner/adapter is an adapter of the kind 'IA3'; only LoRA can",
        ),
        (None, SAME, ""),
    ],
)
def test_plan_refuses_what_nodes_would_of_an_adapter_on_the_hub(
    tmp_path: Path, hub: Path, changes: dict[str, object] | None, keys: str, sentence: str
) -> None:
    """Where the hub is not reached, it goes by the run file."""
    (hub / "owner/base").mkdir(parents=True)
    (hub / "owner/base/config.json").write_text(json.dumps(EIGHT_BILLION))
    if changes is not None:
        adapter_in(hub / "owner/adapter", **changes)
    (tmp_path / "run.toml").write_text(BEGUN + keys)
    asked = read_run_file(tmp_path / "run.toml")
    if not sentence:
        assert len(workload_of_run(as_begun(asked)).layers) == 2 + 36
    else:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            workload_of_run(as_begun(asked))


def test_the_adapter_is_read_with_the_hubs_own_library(tmp_path: Path) -> None:
    """From a repository that only its owner's token opens."""
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
    keys = SAME.replace("8", "16")
    (tmp_path / "run.toml").write_text(
        f'[model]\npretrained = "{tmp_path}"\n[adapter]\npretrained = "{REPOSITORY}"\n{keys}'
    )
    asked = *GPUS, "--run", str(tmp_path / "run.toml"), "--deadline", "0.1"
    with hub_of({"adapter_config.json": json.dumps(PUBLISHED_ADAPTER).encode()}) as there:
        known = {"HF_ENDPOINT": there.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        told = subprocess.run(
            (sys.executable, "-m", "dtfm.coordinator.cli", *asked),
            env={**os.environ, **known, "HF_HOME": str(tmp_path / "hub")},
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
        )
    assert f"adapter.rank = 16, but the adapter in {REPOSITORY} has 8; set rank = 8 in [adapter]" in told.stderr
    assert told.returncode == 2


@pytest.mark.parametrize("weights", ["nf4", "int8", "bf16"])
def test_an_adapter_of_8_billion_parameters_fits_one_gpu_that_is_too_small_to_train_them(
    tmp_path: Path, typed: Typed, weights: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
    text = f'train = {{ global_batch = 32, micro_batch = 1 }}\n[model]\npretrained = "{tmp_path}"\n'
    (tmp_path / "run.toml").write_text(f'{text}weights = "{weights}"\n[adapter]\n[data]\nsequence_length = 1024\n')
    asked = "plan", "--gpus", "RTX 4090", "--links", "100Mbit/s,20ms", "--run", str(tmp_path / "run.toml")
    answer = json.loads(typed(*asked, "--deadline", "1", "--json"))
    assert [len(stage["replicas"]) for stage in answer["plan"]["stages"]] == [1]
    (tmp_path / "run.toml").write_text(f"{text}[data]\nsequence_length = 1024\n")
    typed(*asked, "--deadline", "1", code=1)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"model": {"family": "gpt2"}}, "model.family is 'gpt2'; known without the model are llama, mistral,"),
        ({"model": {"config": {"attention_bias": True}}}, "model.config.attention_bias is True; what that changes"),
        ({"model": {"config": {"num_layers": 3}}}, "model.config.num_layers is 3; what that changes"),
        ({"model": {"config": {"hidden_size": 1.5}}}, "model.config.hidden_size is 1.5; it must be a whole number"),
        (
            {"model": {"family": "mistral"}, "data": {"sequence_length": 8192}},
            "model.config.sliding_window is 4096, less than the 8192 tokens of a sample",
        ),
        ({"data": {"tokenizer": "gpt2"}}, "the vocabulary of 'gpt2' is not known; add vocab_size to model.config"),
        ({"model": {"pretrained": "some/model"}}, "model.pretrained is 'some/model', not a folder with a config.json"),
        (
            {"model": {"pretrained": "some/model"}, "adapter": {"targets": ["q_proj"]}},
            "model.pretrained is 'some/model', not a folder with a config.json",
        ),
        (
            {
                "model": {"pretrained": "FOLDER"},
                "adapter": {"train_also": ["norm"]},
                "data": {"tokenizer": "bytes"},
            },
            "memory with adapter.train_also = ['norm'] is not known without the model; known are embed_tokens, lm_head",
        ),
        (
            {"model": {"pretrained": "FOLDER"}, "adapter": {"rank": 2000}, "data": {"tokenizer": "bytes"}},
            "adapter.rank = 2000: the decoder layers have a matrix of 1024 times 4096; the rank must be at most 1024",
        ),
        (
            {
                "model": {"pretrained": "FOLDER"},
                "adapter": {"targets": ["q_proj", "c_attn"]},
                "data": {"tokenizer": "bytes"},
            },
            "adapter.targets: the decoder layers have no matrix 'c_attn'; they have down_proj, gate_proj, k_proj, o_proj, q_",
        ),
        (
            {
                "model": {"pretrained": "FOLDER"},
                "adapter": {"targets": ["layers.0.self_attn.q_proj"]},
                "data": {"tokenizer": "bytes"},
            },
            "memory with adapter.targets = ['layers.0.self_attn.q_proj'] is not known without the model; known are down_",
        ),
        (
            {"model": {"pretrained": "FOLDER"}, "adapter": {"dora": True}, "data": {"tokenizer": "bytes"}},
            "memory with adapter.dora is not known without the model",
        ),
        ({"train": {"precision": "fp64"}}, "memory in fp64, or with data.isolate_documents, is not known"),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, tables: dict[str, dict[str, object]], sentence: str) -> None:
    if tables.get("model", {}).get("pretrained") == "FOLDER":
        (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
        tables = tables | {"model": {"pretrained": str(tmp_path)}}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        workload_of_run(run_file(**tables))


def test_the_way_out_is_the_node_that_counts(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "run.toml").write_text('[model]\nfamily = "gpt2"\n')
    error = typed(*GPUS, "--run", str(tmp_path / "run.toml"), code=2)
    assert f"To count on the model itself: dtfm-node workload {tmp_path}/run.toml --output WORKLOAD.json" in error
    assert "give --run RUN.toml, or the --workload" in typed(*GPUS, code=2)


def test_a_workload_of_another_batch_is_refused(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "w.json").write_text(dump_workload(even_workload(micro_batches=16)))
    (tmp_path / "run.toml").write_text("")
    files = "--run", str(tmp_path / "run.toml"), "--workload", str(tmp_path / "w.json")
    assert "w.json has 16 micro-batches, but " in typed(*GPUS, *files, code=2)


def test_plan_takes_the_run_file_alone(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "run.toml").write_text("")
    printed = typed(*GPUS, "--run", str(tmp_path / "run.toml"), "--deadline", "0.1")
    assert " tokens per second. The " in printed
    assert "\n200 steps take " in printed


@pytest.mark.parametrize("stages", [1, 2])
def test_of_a_run_that_audits_work_plan_names_the_stages_that_nobody_can_audit(
    stages: int, tmp_path: Path, typed: Typed
) -> None:
    text = (
        f"[model.config]\nhidden_size = 512\nnum_hidden_layers = 2\n[cluster]\nstages = {[2] if stages == 1 else 2}\n"
    )
    run = "plan", "--gpus", "2x L4", "--links", "1Gbit/s,20ms", "--run", str(tmp_path / "run.toml"), "--deadline", "0.1"
    (tmp_path / "run.toml").write_text(text)
    assert "nobody can audit" not in typed(*run)
    (tmp_path / "run.toml").write_text(f'{text}[trust]\nmode = "open"\n')
    assert len(json.loads(typed(*run, "--json")).get("unaudited", ())) == (0 if stages == 1 else 2)
    assert ("nobody can audit stage 0 (" in typed(*run)) == (stages == 2)


@pytest.mark.parametrize(
    ("tables", "advised"),
    [
        ("", True),
        ('[trust]\nmode = "open"\n', True),
        ('[trust]\naudit_rate = 0.1\n[network]\nexchange = "topk"\n', False),
        ("[cluster]\nstages = 1\n", False),
        ("rounds = 9\n", False),
    ],
)
def test_plan_advises_rounds_where_lines_are_slow_and_the_run_may_have_them(
    tables: str, advised: bool, tmp_path: Path, typed: Typed
) -> None:
    model = "[model.config]\nhidden_size = 512\nnum_hidden_layers = 2\n"
    (tmp_path / "run.toml").write_text(f"{model}[train]\nglobal_batch = 1024\n{tables}")
    run = "--run", str(tmp_path / "run.toml"), "--deadline", "0.1"
    slow = "plan", "--gpus", "2x L4", "--links", "20Mbit/s,20ms", *run
    found = json.loads(typed(*slow, "--json"))
    assert ("advice" in found) == advised
    if advised:
        assert (found["advice"]["rounds"], found["advice"]["islands"]) == (100, 2)
        assert "\nWith [train] rounds = 100, 2 islands that exchange every 100 steps reach" in typed(*slow)
        auto = f'{model}[train]\nglobal_batch = 1024\nrounds = "auto"\n[cluster]\nnodes = 2\n'
        (tmp_path / "run.toml").write_text(auto)
        assert " 2 islands exchange every 100 steps: " in typed(*slow[:-1], "2")


def readme() -> str:
    return (Path(__file__).parents[3] / "README.md").read_text()


def run_files() -> list[str]:
    """README's run files: a fine-tune, and all weights."""
    return re.findall(r"```toml\n(.*?)```", readme(), re.DOTALL)


def test_readmes_run_file_can_be_planned(tmp_path: Path, typed: Typed) -> None:
    _, whole = run_files()
    (tmp_path / "run.toml").write_text(whole)
    gpus = "plan", "--gpus", "RTX 3060", "--links", "500Mbit/s,40ms", "--run", str(tmp_path / "run.toml")
    assert "2,000 steps take 919 hours (38.3 days) and cost 73.51" in typed(
        *gpus, "--price", "RTX 3060=0.08", "--deadline", "0.1"
    )
    assert "One such GPU takes 919 hours and costs 73.51" in " ".join(readme().split())


QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def test_readmes_fine_tune_can_be_planned_from_the_models_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    tuned, _ = run_files()
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen/Qwen3-8B").mkdir()
    (tmp_path / "Qwen/Qwen3-8B/config.json").write_text(json.dumps(QWEN3_8B))
    (tmp_path / "run.toml").write_text(tuned)
    monkeypatch.chdir(tmp_path)
    price = "--price", "RTX 4090=0.35"
    told = typed("plan", "--run", "run.toml", "--gpus", "2x RTX 4090", "--links", "100Mbit/s,20ms", *price)
    for figure in ("28.5 s per step", "13.6 / 22.7 GiB", "200 steps take 1.6 hours and cost 1.11"):
        assert figure in told
    assert "28.5 s per step, in 13.6 of 22.7 GiB; 200 steps take 1.6 hours and cost 1.11" in " ".join(readme().split())


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from dtfm.coordinator import cli\n"
        "from dtfm.coordinator.command.planning.run_workload import workload_of_run\n"
        "from dtfm.protos.run_file.run_file import RunFile\n"
        "print(len(workload_of_run(RunFile()).layers))"
    )
    assert subprocess.check_output((sys.executable, "-c", program), text=True, timeout=100) == "10\n"
