"""Frozen weights that this machine has read before: the same bytes, and nothing is read from the source."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from dtfm.node.data.samples import Sample
from dtfm.node.model.causal.weight_files import WeightFiles
from dtfm.node.model.frozen_cache import digest_of
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.node.model.stage import build_stage
from dtfm.protos import plan_pb2
from tests.published import publish

CPU = torch.device("cpu")
SAMPLE = Sample((12,), torch.int64, 256)
PLACE = "memory://kept/model"

PROGRAM = """
import sys, torch
from pathlib import Path
from dtfm.node.model.causal.weight_files import WeightFiles
from tests.node.model.causal.test_kept_frozen import started
read = WeightFiles.read
def counted(files, name):
    print("reads", name, flush=True)
    return read(files, name)
WeightFiles.read = counted
started(sys.argv[1], Path(sys.argv[2]), weights="int8").frozen.load(0, 5, torch.float32)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published"))


@pytest.fixture
def elsewhere(folder: Path) -> str:
    """The same model, not on this machine's disk."""
    put(folder)
    return PLACE


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that were read from the source."""
    found, read = list[str](), WeightFiles.read

    def noted(files: WeightFiles, name: str) -> torch.Tensor:
        found.append(name)
        return read(files, name)

    monkeypatch.setattr(WeightFiles, "read", noted)
    return found


def put(folder: Path) -> None:
    fs = fsspec.filesystem("memory")
    for file in folder.iterdir():
        fs.pipe_file(f"{PLACE}/{file.name}", file.read_bytes())


def started(place: Path | str, cache: Path, *, weights: str = "bf16", seed: int = 7, authority: bytes = b"") -> Model:
    """The model as a node has it that was just started."""
    adapter = plan_pb2.Run.Adapter(rank=4, alpha=8)
    spec = plan_pb2.Run.Model(pretrained=str(place), weights=weights, adapter=adapter)
    model = load_model(spec, SAMPLE)
    model.keep_frozen_in(cache, seed, authority)
    return model


def digests(model: Model) -> Mapping[str, bytes]:
    frozen = model.frozen
    return {name: digest_of(frozen._packing.parts(held)) for name, held in frozen._held.items()}


@pytest.mark.parametrize("weights", ["bf16", pytest.param("int8", marks=pytest.mark.soak), "nf4"])
def test_a_second_start_reads_nothing_from_the_source(
    elsewhere: str, tmp_path: Path, reads: list[str], weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = torch.arange(12).view(1, 12)
    with caplog.at_level(logging.INFO):
        first = started(elsewhere, tmp_path, weights=weights)
        once = build_stage(first, 0, 5, CPU, torch.float32).forward(tokens)
        assert len(reads) == len(digests(first)) == 30
        reads.clear()
        again = started(elsewhere, tmp_path, weights=weights)
        assert torch.equal(build_stage(again, 0, 5, CPU, torch.float32).forward(tokens), once)
    assert not reads
    assert digests(again) == digests(first)
    said = [line for line in caplog.messages if "frozen parameters" in line]
    assert said == [
        "read 30 frozen parameters of layers 0-4 (0 from this machine's cache)",
        "read 30 frozen parameters of layers 0-4 (30 from this machine's cache)",
    ]


def test_a_node_with_other_layers_reads_the_others(elsewhere: str, tmp_path: Path, reads: list[str]) -> None:
    started(elsewhere, tmp_path).frozen.load(0, 2, torch.float32)
    reads.clear()
    started(elsewhere, tmp_path).frozen.load(1, 3, torch.float32)
    assert reads
    assert all(name.startswith("model.layers.1.") for name in reads)


def test_another_packing_and_another_precision_are_kept_apart(elsewhere: str, tmp_path: Path, reads: list[str]) -> None:
    kinds = [("bf16", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.bfloat16), ("nf4", torch.bfloat16)]
    for weights, dtype in kinds:
        reads.clear()
        started(elsewhere, tmp_path, weights=weights).frozen.load(1, 2, dtype)
        assert len(reads) == 9
    reads.clear()
    for weights, dtype in kinds[-3:]:
        started(elsewhere, tmp_path, weights=weights).frozen.load(1, 2, dtype)
    assert not reads


def test_a_damaged_file_is_read_again_from_the_source(elsewhere: str, tmp_path: Path, reads: list[str]) -> None:
    first = started(elsewhere, tmp_path)
    first.frozen.load(1, 2, torch.float32)
    reads.clear()
    spoilt, *_ = sorted(tmp_path.glob("*/*.safetensors"))
    content = spoilt.read_bytes()
    spoilt.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = started(elsewhere, tmp_path)
    again.frozen.load(1, 2, torch.float32)
    assert len(reads) == 1
    assert digests(again) == digests(first)
    assert spoilt.read_bytes() == content


def test_other_values_at_the_same_place_are_not_taken_for_the_ones_before(
    folder: Path, elsewhere: str, tmp_path: Path, reads: list[str]
) -> None:
    started(elsewhere, tmp_path / "cache").frozen.load(1, 2, torch.float32)
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tensors = {name: value + 1 for name, value in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    put(other)
    reads.clear()
    started(elsewhere, tmp_path / "cache").frozen.load(1, 2, torch.float32)
    assert len(reads) == 9


def test_the_same_values_at_another_place_do_not_count(
    folder: Path, tmp_path: Path, elsewhere: str, reads: list[str]
) -> None:
    """Their digest covers a piece of each tensor. Whoever chooses the place could change the rest."""
    started(elsewhere, tmp_path).frozen.load(1, 2, torch.float32)
    fs = fsspec.filesystem("memory")
    for file in folder.iterdir():
        fs.pipe_file(f"{PLACE}-2/{file.name}", file.read_bytes())
    reads.clear()
    started(f"{PLACE}-2", tmp_path).frozen.load(1, 2, torch.float32)
    assert len(reads) == 9


def test_a_folder_here_is_kept_only_if_it_is_packed(folder: Path, tmp_path: Path, reads: list[str]) -> None:
    started(folder, tmp_path / "bf16").frozen.load(0, 5, torch.float32)
    assert not (tmp_path / "bf16").exists()
    started(folder, tmp_path / "nf4", weights="nf4").frozen.load(0, 5, torch.float32)
    reads.clear()
    started(folder, tmp_path / "nf4", weights="nf4").frozen.load(0, 5, torch.float32)
    assert not reads


def test_a_folder_here_that_was_written_again_is_read_again(folder: Path, tmp_path: Path, reads: list[str]) -> None:
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    started(copied, tmp_path / "cache", weights="int8").frozen.load(1, 2, torch.float32)
    reads.clear()
    (copied / "model.safetensors").touch()
    started(copied, tmp_path / "cache", weights="int8").frozen.load(1, 2, torch.float32)
    assert len(reads) == 9


@pytest.mark.soak
def test_of_two_processes_each_parameter_is_read_by_one(folder: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path)]
    running = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [each.communicate(timeout=300)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0]
    names = [line for each in printed for line in each.splitlines()]
    assert len(names) == len(set(names)) == 30, json.dumps(sorted(names))
