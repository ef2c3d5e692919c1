"""What an export's files of weights hold, and how much memory it takes to write them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save

from dtfm.coordinator.command.weights.formats import Format
from dtfm.coordinator.command.weights.shards import Part, write_shards
from dtfm.coordinator.command.weights.stored import Cutter, Tensor, look_at, tensors_of
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError

LOCAL = fsspec.filesystem("file")


def part(file: Path, tensors: dict[str, torch.Tensor], **more: Any) -> Part:
    file.write_bytes(save(tensors))
    stored = look_at(LOCAL, str(file), file.stat().st_size)
    wanted = tuple(tensor for tensor in stored.tensors if not tensor.name.startswith("optimizer."))
    return Part(stored, wanted, lambda _: None, **more)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a.weight": torch.randn(7, 5, generator=generator),
        "b": torch.randn((), generator=generator),
        "none": torch.empty(0, 3),
        "optimizer.exp_avg": torch.randn(36, generator=generator),
    }


@pytest.mark.parametrize("wanted", [None, *Format])
def test_the_weights_are_there_in_the_format_that_was_asked_for(wanted: Format | None, tmp_path: Path) -> None:
    written = write_shards([part(tmp_path / "bucket", weights())], tmp_path, wanted, 1 << 30)
    kind = torch.float32 if wanted is None else getattr(torch, wanted.torch)
    expected = {name: tensor.to(kind) for name, tensor in weights().items() if name != "optimizer.exp_avg"}
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == kind for name, tensor in expected.items())
    content = (tmp_path / "model.safetensors").read_bytes()
    assert written.files == {"model.safetensors": blake3(content).hexdigest()}


def test_constants_keep_their_formats_and_have_a_file_of_their_own(tmp_path: Path) -> None:
    constants = {"mask": torch.tensor([True, False, True]), "bias": torch.ones(3), "steps": torch.tensor(5)}
    parts = [part(tmp_path / "bucket", weights()), part(tmp_path / "buffers", constants, keeps_formats=True)]
    write_shards(parts, tmp_path, Format.BF16, 1 << 30)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    found = load_file(tmp_path / "model-00002-of-00002.safetensors")
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in constants.items()
    )
    assert index["metadata"]["total_size"] == 2 * 36 + 3 + 12 + 8


def test_numbers_that_become_infinite_are_counted(tmp_path: Path) -> None:
    large = {"fine": torch.ones(3), "large": torch.tensor([1e5, 1.0, -7e4]), "was": torch.tensor([torch.inf])}
    written = write_shards([part(tmp_path / "bucket", large)], tmp_path, Format.FP16, 1 << 30)
    assert written.infinite == {"large": 2}


def test_memory_does_not_grow_with_a_bucket(tmp_path: Path) -> None:
    each = part(tmp_path / "bucket", {"large": torch.zeros(16 << 20)})
    tracemalloc.start()
    try:
        write_shards([each], tmp_path, Format.BF16, 1 << 30)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "model.safetensors").stat().st_size > 32 << 20
    assert most < 32 << 20


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 30))
def test_pieces_are_cut_between_numbers_wherever_they_end(sizes: list[int], at_once: int) -> None:
    tensors, at = [], 0
    for number, size in enumerate(sizes):
        kind, each = [("F32", 4), ("F64", 8), ("BF16", 2)][number % 3]
        tensors.append(Tensor(str(number), kind, (size,), at, at + each * size))
        at += each * size
    content = np.random.default_rng(0).bytes(at)
    found: dict[str, bytes] = {}

    def take(tensor: Tensor, data: memoryview) -> None:
        assert len(data) % {"F32": 4, "F64": 8, "BF16": 2}[tensor.dtype] == 0
        found[tensor.name] = found.get(tensor.name, b"") + bytes(data)

    cutter = Cutter(tuple(tensors), take)
    for start in range(0, at, at_once):
        cutter.add(memoryview(content)[start : start + at_once])
    assert found == {each.name: content[each.begin : each.end] for each in tensors if each.end > each.begin}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F8", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
        b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}',
    ],
)
def test_a_header_that_describes_something_else_is_no_header(header: bytes) -> None:
    with pytest.raises(CheckpointError, match="the file is not safetensors"):
        tensors_of(header, 4, "the file")
