"""The model of a run with an adapter: trained and frozen parameters, and adapters that are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtfm.node.data.samples import Sample
from dtfm.node.host.work import WORK
from dtfm.node.model.causal.adapter import lengths_of_rows
from dtfm.node.model.causal.adapter_files import AdapterFiles
from dtfm.node.model.causal.weight_files import WeightFiles
from dtfm.node.model.cost.layer_costs import layer_costs
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.node.model.stage import build_stage
from dtfm.protos import plan_pb2
from tests.published import publish, publish_adapter

CPU = torch.device("cpu")
SAMPLE = Sample((12,), torch.int64, 256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published"))


def model_of(
    folder: Path,
    *,
    weights: str = "bf16",
    rank: int = 4,
    targets: tuple[str, ...] = (),
    pretrained: Path | str = "",
    dora: bool = False,
) -> Model:
    adapter = plan_pb2.Run.Adapter(rank=rank, alpha=8, targets=targets, pretrained=str(pretrained), dora=dora)
    return load_model(plan_pb2.Run.Model(pretrained=str(folder), weights=weights, adapter=adapter), SAMPLE)


def test_buckets_have_the_adapter_alone_layer_by_layer(folder: Path) -> None:
    model = model_of(folder)
    assert [spec.layers for spec in model.buckets] == [(0,), (1,), (2,), (3,), (4,)]
    assert [bool(spec.parameters) for spec in model.buckets] == [False, True, True, True, False]
    names = [name for name, _ in model.buckets[1].parameters]
    assert len(names) == 2 * 7
    assert names[0] == "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    named = model_of(folder, targets=("q_proj", "v_proj"))
    assert [len(spec.parameters) for spec in named.buckets] == [0, 4, 4, 4, 0]


def test_its_initial_values_follow_from_the_seed_and_the_bucket_alone(folder: Path) -> None:
    model = model_of(folder)
    spec = model.buckets[1]
    once, again, other = (model.initial_parameters(spec, seed) for seed in (7, 7, 8))
    for name, value in once.items():
        assert torch.equal(value, again[name])
        assert bool(value.any()) == (".lora_A." in name)  # the product is zero, as in peft
        assert torch.equal(value, other[name]) == (".lora_B." in name)
    bound = 32**-0.5  # of kaiming_uniform_ with a = sqrt(5), for 32 numbers a row
    first = once["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert 0.9 * bound < first.abs().max() <= bound


def test_doras_lengths_begin_as_those_of_the_matrix_as_nodes_keep_it(folder: Path) -> None:
    for weights, apart in (("bf16", 1e-6), ("nf4", 0.2)):
        model = model_of(folder, weights=weights, dora=True)
        name = "model.layers.0.mlp.down_proj.lora_magnitude_vector.default.weight"
        begun = model.initial_parameters(model.buckets[1], 7)[name]
        matrix = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
        torch.testing.assert_close(begun, matrix.norm(dim=1), rtol=apart, atol=0)
    assert begun.shape == (32,)


def test_the_planner_knows_the_memory_that_lengths_of_rows_take(folder: Path) -> None:
    """The matrix is made again, with the product added."""
    run = plan_pb2.Run(train=plan_pb2.Run.Train(micro_batch=2, precision=plan_pb2.FP32))
    with_lengths, without = (layer_costs(model_of(folder, dora=dora), run)[1] for dora in (True, False))
    numbers = sum((32, 32, 32, 32, 64, 64, 32))
    assert with_lengths.parameter_bytes - without.parameter_bytes == 4 * numbers
    assert with_lengths.kept_bytes > without.kept_bytes
    assert with_lengths.working_bytes - without.working_bytes > 2 * 4 * 32 * 64


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8, 17])
def test_lengths_of_rows_are_what_torch_finds(columns: int) -> None:
    matrix = torch.randn(4, columns)
    torch.testing.assert_close(lengths_of_rows(matrix), matrix.norm(dim=1))


def test_a_stage_reads_its_own_layers_alone_and_each_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    of_file = WeightFiles.read

    def noted(files: WeightFiles, name: str) -> torch.Tensor:
        read.append(name)
        return of_file(files, name)

    monkeypatch.setattr(WeightFiles, "read", noted)
    model = model_of(folder)
    assert not read
    first = build_stage(model, 0, 2, CPU, torch.float32)
    assert {
        name.partition(".self_attn")[0].partition(".mlp")[0].partition(".inp")[0].partition(".post")[0] for name in read
    } == {
        "model.embed_tokens.weight",
        "model.layers.0",
    }
    read.clear()
    build_stage(model, 1, 3, CPU, torch.float32)
    assert read
    assert all(name.startswith("model.layers.1.") for name in read)
    model.frozen.keep((1, 2))
    read.clear()
    build_stage(model, 0, 2, CPU, torch.float32)
    assert read == ["model.embed_tokens.weight"]
    device, host = first.state_bytes
    trained = sum(bucket.spec.size for bucket in first.buckets.values())
    assert (device, host) == (4 * 4 * trained + model.frozen.stage_bytes(0, 2, torch.float32), 0)


def test_reading_early_stops_where_the_room_ends(folder: Path) -> None:
    model = model_of(folder)
    model.frozen.load(0, 2, torch.float32, most_bytes=model.frozen.layer_bytes(0, torch.float32))
    assert list(model.frozen._held) == ["model.embed_tokens.weight"]


def test_each_frozen_parameter_that_is_read_is_progress(folder: Path) -> None:
    model, (before, _) = model_of(folder), WORK.so_far
    model.frozen.load(0, 2, torch.float32)
    assert WORK.so_far[0] - before >= len(model.frozen._held) > 2


def test_frozen_weights_cost_no_gradients(folder: Path) -> None:
    model = model_of(folder)
    run = plan_pb2.Run(train=plan_pb2.Run.Train(micro_batch=2, precision=plan_pb2.FP32))
    costs = layer_costs(model, run)
    assert [layer.parameter_bytes for layer in costs] == [0, *[4 * spec.size for spec in model.buckets[1:4]], 0]
    parameters = sum(p.numel() for p in model.module.parameters() if not p.requires_grad)
    assert sum(layer.frozen_bytes for layer in costs) == 4 * parameters
    for layer, spec in zip(costs, model.buckets, strict=True):
        assert layer.backward_flops == layer.forward_flops + 2 * 2 * 12 * spec.size
    assert 2 < model.passes < 2.2


@pytest.mark.parametrize(("weights", "most"), [("nf4", 0.16), ("int8", 0.30)])
def test_packed_weights_take_the_bytes_that_the_planner_counts(tmp_path: Path, weights: str, most: float) -> None:
    folder = publish(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    model = model_of(folder, weights=weights)
    build_stage(model, 1, 2, CPU, torch.float32)
    taken = sum(map(bytes_of, model.frozen._held.values()))
    counted = model.frozen.layer_bytes(1, torch.float32)
    assert taken == pytest.approx(counted, rel=0.001)
    assert counted < most * model_of(folder).frozen.layer_bytes(1, torch.float32)


def bytes_of(parameter: Any) -> int:
    scales = parameter.SCB.nbytes if hasattr(parameter, "SCB") else 0
    if (state := getattr(parameter, "quant_state", None)) is not None:
        of_scales = state.state2.absmax.nbytes + state.state2.code.nbytes + state.offset.nbytes
        scales = state.absmax.nbytes + state.code.nbytes + of_scales
    size: int = parameter.nbytes + scales
    return size


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"rank": 33},
            "adapter.rank = 33: model.layers.0.self_attn.q_proj is a matrix of 32 times 32; the rank must be at most 32",
        ),
        (
            {"targets": ("q_proj", "query")},
            "adapter.targets: the decoder layers have no matrix 'query'; they have down_proj, gate_proj, k_proj, o_proj, q_proj, "
            "up_proj, v_proj",
        ),
        ({"targets": ("lm_head",)}, "adapter.targets: the decoder layers have no matrix 'lm_head'"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(folder: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^adapter") as refused:
        model_of(folder, **settings)
    assert str(refused.value).startswith(sentence)


def test_without_bitsandbytes_packed_weights_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ValueError, match=r'^model.weights = "nf4" needs bitsandbytes, which cannot be imported here .* pip install'
    ):
        model_of(folder, weights="nf4")


def test_it_begins_with_the_numbers_of_a_published_adapter(folder: Path, tmp_path: Path) -> None:
    begun = publish_adapter(tmp_path / "adapter", folder)
    model = model_of(folder, pretrained=begun)
    stored = load_file(begun / "adapter_model.safetensors")
    found = {name: value for spec in model.buckets for name, value in model.initial_parameters(spec, 7).items()}
    assert len(found) == len(stored) == 3 * 2 * 7
    for name, value in found.items():
        assert torch.equal(value, stored[f"base_model.model.{name.replace('.default', '')}"])
    fresh = model_of(folder).weights_fingerprint(7)
    before = model.weights_fingerprint(7)
    assert before[:64] == fresh
    assert len(before) == 128
    save_file({name: -value for name, value in stored.items()}, begun / "adapter_model.safetensors", {"format": "pt"})
    assert model_of(folder, pretrained=begun).weights_fingerprint(7)[:64] == fresh
    assert model_of(folder, pretrained=begun).weights_fingerprint(7) != before


@pytest.mark.parametrize(
    ("published", "complaint"),
    [
        ({"r": 8}, "adapter.rank = 4, but the adapter in ADAPTER has 8; set rank = 8 in [adapter]"),
        ({"lora_alpha": 4}, "adapter.alpha = 8.0, but the adapter in ADAPTER has 4.0; set alpha = 4.0 in [adapter]"),
        ({"use_rslora": True}, "adapter.rs = false, but the adapter in ADAPTER has true; set rs = true in [adapter]"),
        (
            {"target_modules": ["q_proj"]},
            "adapter.pretrained: ADAPTER: it has no base_model.model.model.layers.0.mlp.down_proj.lora_A.weight, which the run "
            "trains; set adapter.targets = ['q_proj']",
        ),
        ({"use_dora": True}, "adapter.dora = false, but the adapter in ADAPTER has true; set dora = true in [adapter]"),
        (
            {"rank_pattern": {"q_proj": 2}},
            "adapter.pretrained: ADAPTER has rank_pattern = {'q_proj': 2}, which runs do not train; merge it",
        ),
        (
            {"modules_to_save": ["lm_head"]},
            "adapter.pretrained: ADAPTER: it has base_model.model.lm_head.weight, which the run does not train; set "
            "adapter.train_also = ['lm_head']",
        ),
    ],
)
def test_an_adapter_to_begin_with_that_differs_from_the_runs_is_refused(
    folder: Path, tmp_path: Path, published: dict[str, Any], complaint: str
) -> None:
    begun = publish_adapter(tmp_path / "adapter", folder, **published)
    with pytest.raises(ValueError, match=r"^adapter") as refused:
        model_of(folder, pretrained=begun)
    assert str(refused.value).startswith(complaint.replace("ADAPTER", str(begun)))


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = publish(tmp_path / "other", hidden_size=64)
    begun = publish_adapter(tmp_path / "adapter", other)
    with pytest.raises(
        ValueError, match=r"lora_A.weight has shape \[4, 64\], and .*it is an adapter for another model"
    ):
        model_of(folder, pretrained=begun)
    config = json.loads((begun / "adapter_config.json").read_text())
    (begun / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "owner/other"}))
    files = AdapterFiles(str(begun))
    with pytest.raises(ValueError, match=r"is an adapter for another model, owner/other; set model.pretrained to that"):
        files.check(plan_pb2.Run.Adapter(rank=4, alpha=8), {}, "owner/mine@main")


def test_an_adapter_in_place_of_a_model_is_told_how_to_be_named(folder: Path, tmp_path: Path) -> None:
    """The coordinator had no such folder, otherwise it would have read it."""
    begun = publish_adapter(tmp_path / "adapter", folder)
    with pytest.raises(
        ValueError, match=r"has no config.json .*it is an adapter: name its model as model.pretrained"
    ) as told:
        model_of(begun)
    assert str(told.value).endswith(f"('{folder}'), and the folder as adapter.pretrained")
