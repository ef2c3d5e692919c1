"""Nodes and transformers can read what nodes write into a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import safetensors.torch
import torch
from blake3 import blake3
from transformers import AutoModelForCausalLM, AutoTokenizer

from dtfm.node.data.dataset import Data
from dtfm.node.data.load import load_data
from dtfm.node.data.samples import Sample
from dtfm.node.data.shared.storage import write
from dtfm.node.host.work import WORK
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.model.generate_text import forget, writer_in
from dtfm.node.model.model import Model
from dtfm.node.model.sequential import load_sequential
from dtfm.node.model.stage import Stage, build_stage
from dtfm.node.state import snapshot_files
from dtfm.node.state.recovery import check_agreed
from dtfm.node.state.snapshot_files import (
    MOST_CONSTANTS_BYTES,
    Loading,
    SnapshotDamaged,
    constants_file,
    file_header,
    file_name,
    read_bucket,
    write_model_files,
)
from dtfm.protos import plan_pb2
from dtfm.protos.checkpoint_names import bucket_file
from dtfm.protos.control_pb2 import BucketState, SnapshotSource
from tests.node.load_once import load_once
from tests.node.model.initialised import initialise_all
from tests.node.model.test_stage import CPU, SIZES, stage_of
from tests.node.state.snapshot_nodes import content_of
from tests.tokenizer import make_tokenizer

TEXT = "All nodes hold the same state after every commit.\n" * 20


def text_data(folder: Path, tokenizer: str = "bytes") -> Data:
    (folder / "text.txt").write_text(TEXT)
    data = plan_pb2.Run.Data(
        source=str(folder / "*.txt"), tokenizer=tokenizer, sequence_length=16, evaluation_fraction=0.1
    )
    return load_data(plan_pb2.Run(data=data))


def model_for(family: str, data: Data, **config: object) -> Model:
    spec = plan_pb2.Run.Model(family=family, config_json=json.dumps(SIZES | config))
    return load_once(spec, data.sample)


def name_of(index: int, content: bytes) -> str:
    return bucket_file(index, blake3(content).hexdigest()[:32])


def write_checkpoint(
    folder: str,
    stages: list[Stage],
    name_of: Callable[[int, bytes], str] = name_of,
    **changes: object,
) -> None:
    """As nodes and the coordinator do together."""
    written: dict[int, bytes] = {}
    for stage in stages:
        for index, bucket in stage.buckets.items():
            if index not in written:
                written[index] = content_of(bucket)
                write(folder, name_of(index, written[index]), written[index])
    entries = [
        {"index": index, "file": name_of(index, content), "bytes": len(content), "blake3": blake3(content).hexdigest()}
        for index, content in sorted(written.items())
    ]
    manifest = {"format": 1, "run": "test", "run_id": "00", "step": 3, "buckets": entries} | changes
    with fsspec.open(f"{folder}/manifest.json", "w") as file:
        json.dump(manifest, file)


def export(checkpoint: Path, folder: Path) -> None:
    """Merges the parameters, as the coordinator's `export` does."""
    folder.mkdir()
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("bucket-*.safetensors")):
        tensors = safetensors.torch.load_file(file)
        weights |= {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in checkpoint.iterdir():
        if not file.name.startswith(("bucket-", "manifest")):
            (folder / file.name).write_bytes(file.read_bytes())


def with_moments(stage: Stage) -> Stage:
    generator = torch.Generator().manual_seed(1)
    for bucket in stage.buckets.values():
        for moment in bucket.moments:
            moment.copy_(torch.rand(moment.shape, generator=generator, dtype=torch.float64))
    return stage


@pytest.mark.parametrize("scheme", ["file", "plain", "memory"])
def test_any_stage_reads_what_other_stages_wrote(scheme: str, tmp_path: Path) -> None:
    model = model_for("gpt2", text_data(tmp_path))
    places = {
        "file": f"file://{tmp_path}/run/step-3",
        "plain": f"{tmp_path}/run/step-3",
        "memory": f"memory://{uuid4().hex}",
    }
    folder = places[scheme]
    count = len(model.layers)
    whole = with_moments(stage_of(model, 0, count))
    parts = [
        build_stage(model, first, past, CPU, torch.float64, held=whole.buckets) for first, past in ((0, 2), (2, count))
    ]
    write_checkpoint(folder, parts)
    back = build_stage(model, 0, count, CPU, torch.float64)
    for bucket in back.buckets.values():
        read(folder, bucket)
    assert all(back.buckets[index].digests()[0] == bucket.digests()[0] for index, bucket in whole.buckets.items())
    fs, path = fsspec.core.url_to_fs(folder)
    names = sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False))
    contents = [fs.cat_file(f"{path}/{name}") for name in names[:-1]]
    assert names == [*(name_of(index, content) for index, content in enumerate(contents)), "manifest.json"]


def test_each_piece_of_a_checkpoint_that_is_read_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow place does not look like a hang."""
    monkeypatch.setattr(snapshot_files, "PIECE_BYTES", 5000)
    model = model_for("gpt2", text_data(tmp_path))
    stage = stage_of(model, 1, 2)
    write_checkpoint(str(tmp_path / "slow"), [stage])
    (before, _), size = WORK.so_far, len(content_of(stage.buckets[1]))
    read(tmp_path / "slow", Bucket(model.buckets[1], CPU, torch.float64))
    assert WORK.so_far[0] - before >= size / 5000 > 2


def test_a_checkpoint_of_before_files_had_one_time_names_is_read(tmp_path: Path) -> None:
    model = model_for("gpt2", text_data(tmp_path))
    stage = stage_of(model, 1, 2)
    write_checkpoint(str(tmp_path / "old"), [stage], lambda index, _: file_name(index))
    target = Bucket(model.buckets[1], CPU, torch.float64)
    read(tmp_path / "old", target)
    assert torch.equal(target.parameters, stage.buckets[1].parameters)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_transformers_loads_the_export_with_equal_logits(family: str, tied: bool, tmp_path: Path) -> None:
    data = text_data(tmp_path)
    model = model_for(family, data, tie_word_embeddings=tied)
    stage = build_stage(model, 0, len(model.layers), CPU, torch.float32)
    initialise_all(stage, 4)
    write_checkpoint(str(tmp_path / "checkpoint"), [stage])
    write_model_files(str(tmp_path / "checkpoint"), model, data)
    export(tmp_path / "checkpoint", tmp_path / "export")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert next(loaded.parameters()).dtype == torch.float32
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(loaded.eval()(tokens).logits, stage.forward(tokens), rtol=1e-6, atol=1e-6)
    for seed, same in ((3, False), (4, True)):
        forget(loaded, seed)
        assert torch.allclose(loaded(tokens).logits, stage.forward(tokens), rtol=1e-6, atol=1e-6) == same


def test_the_export_brings_its_tokenizer(tmp_path: Path) -> None:
    data = text_data(tmp_path, make_tokenizer(tmp_path / "tokenizer", TEXT))
    model = model_for("gpt2", data)
    write_checkpoint(str(tmp_path / "checkpoint"), [stage_of(model, 0, len(model.layers))])
    write_model_files(str(tmp_path / "checkpoint"), model, data, torch.float64)
    export(tmp_path / "checkpoint", tmp_path / "export")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").dtype == torch.float64
    writer = writer_in(tmp_path / "export", CPU)
    assert writer.tokenizer.vocabulary() == tokenizer.get_vocab()


def read(folder: Path | str, bucket: Bucket) -> None:
    """Reads it by the manifest that is there now, as if the coordinator had written that."""
    fs, path = fsspec.core.url_to_fs(str(folder))
    read_bucket(str(folder), bucket, blake3(fs.cat_file(f"{path}/manifest.json")).digest())


def damage(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (found,) = folder.glob(file)
        found.write_bytes(change(found.read_bytes()))

    return apply


def manifest_with(**changes: object) -> Callable[[Path], None]:
    return damage("manifest.json", lambda text: json.dumps(json.loads(text) | changes).encode())


FILE = "bucket-00001-*"


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (manifest_with(format=2), "has format 2, this node reads 1"),
        (damage(FILE, lambda content: content[:-1] + bytes([content[-1] ^ 1])), "is damaged"),
        (damage(FILE, lambda content: content[:-8]), "is damaged"),
        (damage(FILE, lambda content: content + bytes(1 << 21)), "is longer than"),
    ],
)
def test_a_damaged_checkpoint_is_refused(harm: Callable[[Path], None], complaint: str, tmp_path: Path) -> None:
    model = model_for("gpt2", text_data(tmp_path))
    stage = stage_of(model, 1, 2)
    write_checkpoint(str(tmp_path / "checkpoint"), [stage])
    harm(tmp_path / "checkpoint")
    target = Bucket(model.buckets[1], CPU, torch.float64)
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path / "checkpoint", target)


def test_a_checkpoint_without_a_manifest_is_not_whole(tmp_path: Path) -> None:
    model = model_for("gpt2", text_data(tmp_path))
    with pytest.raises(SnapshotDamaged, match="it was never finished"):
        read_bucket(str(tmp_path), Bucket(model.buckets[1], CPU, torch.float64), b"")


def test_another_manifest_than_the_coordinator_names_is_refused_whatever_it_says(tmp_path: Path) -> None:
    """As whoever may write to the storage can make it, with files of their own."""
    model = model_for("gpt2", text_data(tmp_path))
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    stages = [with_moments(stage_of(model, 1, 2)), stage_of(model, 1, 2, seed=9)]
    for folder, stage in zip((mine, theirs), stages, strict=True):
        write_checkpoint(str(folder), [stage])
    named = blake3((mine / "manifest.json").read_bytes()).digest()
    target = Bucket(model.buckets[1], CPU, torch.float64)
    read_bucket(str(mine), target, named)
    assert target.digests()[0] == stages[0].buckets[1].digests()[0]
    for file in theirs.iterdir():
        (mine / file.name).write_bytes(file.read_bytes())
    read(mine, target)
    with pytest.raises(ValueError, match="not the one that the coordinator wrote"):
        read_bucket(str(mine), target, named)


def test_a_whole_file_with_other_state_than_was_agreed_on_is_refused(tmp_path: Path) -> None:
    """Whoever wrote it wrote something else, under the right digest of the file."""
    model = model_for("gpt2", text_data(tmp_path))
    agreed, written = stage_of(model, 1, 2).buckets[1], stage_of(model, 1, 2, seed=9)
    write_checkpoint(str(tmp_path / "checkpoint"), [written])
    target = Bucket(model.buckets[1], CPU, torch.float64)
    read(tmp_path / "checkpoint", target)
    check_agreed([target], SnapshotSource(states=[BucketState(bucket=1, digest=target.digests()[0])]))
    check_agreed([target], SnapshotSource(states=[BucketState(bucket=0, digest=agreed.digests()[0])]))
    with pytest.raises(SnapshotDamaged, match="bucket 1 is whole, but not the state"):
        check_agreed([target], SnapshotSource(states=[BucketState(bucket=1, digest=agreed.digests()[0])]))


@pytest.mark.parametrize(("config", "dtype"), [({"hidden_size": 16}, torch.float64), ({}, torch.float32)])
def test_a_checkpoint_of_another_run_is_refused(config: dict[str, object], dtype: torch.dtype, tmp_path: Path) -> None:
    data = text_data(tmp_path)
    stage = stage_of(model_for("gpt2", data), 1, 2)
    write_checkpoint(str(tmp_path / "checkpoint"), [stage])
    target = Bucket(model_for("gpt2", data, **config).buckets[1], CPU, dtype)
    with pytest.raises(ValueError, match="; resume with th"):
        read(tmp_path / "checkpoint", target)


SPEC = BucketSpec(0, (0,), (("a", (2,)), ("b", (2, 1))))
HEADER, STATE = file_header(SPEC, torch.float32), bytes(range(48))


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_a_file_is_loaded_whatever_the_pieces_in_which_it_comes(at_once: int) -> None:
    bucket = Bucket(SPEC, CPU, torch.float32)
    loading, content = Loading(bucket, "here"), HEADER + STATE
    for start in range(0, len(content), at_once):
        loading.take(memoryview(content)[start : start + at_once])
    loading.finish()
    assert bucket.read() == STATE


@pytest.mark.parametrize(
    "content",
    [
        b"",
        HEADER[:-1],
        HEADER,
        HEADER + STATE[:-1],
        HEADER + STATE + b"\0",
        b"\xff" * (len(HEADER) + len(STATE)),
        HEADER.replace(b"a", b"c", 1) + STATE,
        HEADER.replace(b"F32", b"I32", 1) + STATE,
        file_header(replace(SPEC, parameters=(("b", (2, 1)), ("a", (2,)))), torch.float32) + STATE,
        file_header(SPEC, torch.float32, weights=True) + STATE[:16],
        file_header(SPEC, torch.float64) + STATE + STATE,
    ],
)
@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_what_is_no_file_of_the_bucket_is_refused(content: bytes, at_once: int) -> None:
    loading = Loading(Bucket(SPEC, CPU, torch.float32), "here")
    for start in range(0, len(content), at_once):
        loading.take(memoryview(content)[start : start + at_once])
    with pytest.raises(ValueError, match=f"^here: its {len(content)} bytes are not what a bucket .*, which are"):
        loading.finish()


class Scaled(torch.nn.Linear):
    """A layer with a constant that its state dict has, and one that it has not."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.register_buffer("scale", torch.tensor([3, 4]))
        self.register_buffer("computed", torch.ones(2), persistent=False)


def test_constants_of_the_state_dict_go_with_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    constants = load_sequential(
        lambda: torch.nn.Sequential(Scaled(4)), "mine:model", Sample((4,), torch.float32)
    ).constants
    assert {name: value.tolist() for name, value in constants.items()} == {"0.scale": [3, 4]}
    assert safetensors.torch.load(constants_file(constants))["0.scale"].tolist() == [3, 4]
    assert constants_file({}) == b""
    assert constants_file({"mask": torch.empty(MOST_CONSTANTS_BYTES + 1, dtype=torch.uint8)}) == b""
    assert "they are left out. Register those that can be computed again with persistent=False" in caplog.text
