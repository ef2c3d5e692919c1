"""Training begins with the weights of a folder that transformers wrote, of which a node reads its own layers alone."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import RevisionNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dtfm.node.data.samples import Sample
from dtfm.node.data.text.tokenizer import Bytes, load_tokenizer
from dtfm.node.host.work import WORK
from dtfm.node.model.causal import weight_files
from dtfm.node.model.causal.adapter_files import AdapterFiles
from dtfm.node.model.causal.weight_files import WeightFiles
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.protos import plan_pb2, weights_fingerprint
from tests.node.model.test_stage import CONFIGS as DENSE, MIXTURES
from tests.tokenizer import make_tokenizer

CONFIGS = DENSE | MIXTURES
VOCABULARY = 61
TEXT = Sample((12,), torch.int64, VOCABULARY)
INDEX = "model.safetensors.index.json"


def save(
    folder: Path, family: str = "llama", *, shards: str = "20KB", dtype: Any = torch.float32, **config: Any
) -> Any:
    """A model with random weights, saved by transformers in several files."""
    made = AutoConfig.for_model(family, **({"vocab_size": VOCABULARY} | (config or CONFIGS[family])))
    torch.manual_seed(3)
    module: Any = AutoModelForCausalLM.from_config(made).to(dtype)
    module.save_pretrained(folder, max_shard_size=shards)
    return module


def load(folder: Path | str, **model: Any) -> Model:
    return load_model(plan_pb2.Run.Model(pretrained=str(folder), **model), TEXT)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(folder)
    assert (folder / INDEX).exists()
    return folder


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    """A copy of ``llama`` to spoil."""
    return Path(shutil.copytree(llama, tmp_path / "copied"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_is_what_transformers_loads(name: str, tmp_path: Path) -> None:
    save(tmp_path, name.partition("-")[0], **CONFIGS[name])
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    model = load(tmp_path)
    for bucket in model.buckets:
        values = model.initial_parameters(bucket, seed=1)
        assert list(values) == [name for name, _ in bucket.parameters]
        for name, value in values.items():
            torch.testing.assert_close(value, expected.pop(name).detach(), rtol=0, atol=0)
    assert not expected


def test_each_byte_is_read_by_the_holders_of_its_layer_alone(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes, each with its own stage. What they read of the files' tensors overlaps nowhere and leaves nothing out."""
    files = WeightFiles(str(llama))
    reads: list[tuple[str, int, int]] = []
    fs = type(fsspec.filesystem("file"))
    cat = fs.cat_file

    def counted(self: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        assert start is not None
        assert end is not None
        reads.append((Path(path).name, start, end))
        return bytes(cat(self, path, start=start, end=end, **more))

    monkeypatch.setattr(fs, "cat_file", counted)
    nodes = [(load(llama), layers) for layers in ((0, 2), (2, 4), (4, 5))]
    reads.clear()  # of the config, the index and the headers
    for model, layers in nodes:
        for bucket in model.buckets:
            if bucket.used_by(*layers):
                model.initial_parameters(bucket, seed=1)
    stored = sorted((tensor.file, tensor.begin, tensor.end) for tensor in files.tensors.values())
    assert sorted(reads) == stored


def test_each_piece_of_a_tensor_that_is_read_is_progress(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow line does not look like a hang."""
    name, whole = max(load_file(next(llama.glob("*.safetensors"))).items(), key=lambda item: item[1].nbytes)
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 1000)
    (before, _), pieces = WORK.so_far, math.ceil(whole.nbytes / 1000)
    assert torch.equal(WeightFiles(str(llama)).read(name), whole)
    assert pieces > 2
    assert WORK.so_far[0] == before + pieces


def test_precision_may_differ_from_the_files(tmp_path: Path) -> None:
    module = save(tmp_path, dtype=torch.bfloat16)
    model = load(tmp_path)
    assert model.module.config.dtype == torch.float32
    values = model.initial_parameters(model.buckets[1], seed=1)
    for name, value in values.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, module.get_parameter(name).detach().float())


def test_any_place_that_fsspec_knows_will_do(llama: Path) -> None:
    fs = fsspec.filesystem("memory")
    for file in llama.iterdir():
        fs.pipe_file(f"/weights/{file.name}", file.read_bytes())
    there, here = load("memory://weights"), load(llama)
    assert there.weights_fingerprint(7) == here.weights_fingerprint(7) != b""
    bucket = here.buckets[2]
    for name, value in here.initial_parameters(bucket, 1).items():
        assert torch.equal(value, there.initial_parameters(bucket, 1)[name])


def test_the_fingerprint_tells_weights_of_another_kind(copied: Path, llama: Path, tmp_path: Path) -> None:
    fingerprint = load(llama).weights_fingerprint(7)
    assert load(copied).weights_fingerprint(7) == fingerprint
    change_config(copied, rms_norm_eps=1e-3)
    save(tmp_path / "bf16", dtype=torch.bfloat16)
    described = {load(folder).weights_fingerprint(7)[:32] for folder in (llama, copied, tmp_path / "bf16")}
    assert len(described) == 3


def test_the_fingerprint_tells_other_values_of_any_tensor(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tensor it takes a piece, whose place depends on the seed, and no more."""
    monkeypatch.setattr(weights_fingerprint, "PIECE_BYTES", 16)
    files = WeightFiles(str(copied))

    def digest(seed: int) -> bytes:
        return WeightFiles(str(copied)).digest_of_values(seed)

    before = load(copied).weights_fingerprint(7)
    assert before == files.digest + digest(7)
    assert digest(8) != digest(7)
    for name, stored in files.tensors.items():
        path = copied / stored.file
        content = path.read_bytes()
        negated = (-files.read(name)).contiguous().view(torch.uint8).numpy().tobytes()
        path.write_bytes(content[: stored.begin] + negated + content[stored.end :])
        assert WeightFiles(str(copied)).digest == before[:32]
        assert digest(7) != before[32:], name
        path.write_bytes(content)
    assert digest(7) == before[32:]
    reads: list[int] = []
    fs = type(fsspec.filesystem("file"))
    cat = fs.cat_file

    def counted(self: Any, path: str, start: int, end: int) -> bytes:
        reads.append(end - start)
        return bytes(cat(self, path, start=start, end=end))

    monkeypatch.setattr(fs, "cat_file", counted)
    files.digest_of_values(7)
    files.digest_of_values(7)
    assert reads == [16] * len(files.tensors)
    reads.clear()
    monkeypatch.setattr(weights_fingerprint, "MOST_PIECES", 5)
    files.digest_of_values(9)
    assert len(reads) == 5


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"family": "gpt2"},
            "model.family: 'gpt2' is given, but model.pretrained is a 'llama'; leave model.family out",
        ),
        ({"config_json": '{"hidden_size": 64}'}, "model.config.hidden_size: 64 is given, but .* has 32; leave it out"),
        ({"config_json": '{"hiden_size": 64}'}, "has no setting 'hiden_size'"),
    ],
)
def test_what_the_run_says_otherwise_is_refused(llama: Path, given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load(llama, **given)
    load(llama, family="llama", config_json='{"hidden_size": 32}')


def test_a_folder_that_asks_for_the_routers_loss_needs_a_word_from_the_run(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    change_config(tmp_path, output_router_logits=True)
    with pytest.raises(ValueError, match="output_router_logits: the routers' auxiliary loss cannot be computed"):
        load(tmp_path)
    load(tmp_path, config_json='{"output_router_logits": false}')


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder: Path, part: str, tensor: torch.Tensor | None, name: str = "") -> None:
    """Replaces, or removes, the first tensor whose name contains ``part``."""
    index = json.loads((folder / INDEX).read_text())
    found = next(name for name in index["weight_map"] if part in name)
    file = folder / index["weight_map"].pop(found)
    tensors = load_file(file)
    del tensors[found]
    if tensor is not None:
        tensors[name or found] = tensor
        index["weight_map"][name or found] = file.name
    save_file(tensors, file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another shape": (
        lambda folder: change_config(folder, intermediate_size=96),
        r"down_proj.weight has shape \[32, 48\] there, but \[32, 96\] by its own config.json",
    ),
    "more layers": (
        lambda folder: change_config(folder, num_hidden_layers=2),
        "LlamaForCausalLM does not train model.layers.2.input_layernorm.weight, .* and 6 more",
    ),
    "fewer layers": (
        lambda folder: change_config(folder, num_hidden_layers=4),
        "model.layers.3.* and 6 more are missing; copy the folder again",
    ),
    "one tensor missing": (
        lambda folder: change_tensors(folder, "q_proj", None),
        "q_proj.weight is missing; copy the folder again",
    ),
    "an unknown tensor": (
        lambda folder: change_tensors(folder, "q_proj", torch.zeros(3), "model.layers.0.self_attn.secret"),
        "LlamaForCausalLM does not train model.layers.0.self_attn.secret",
    ),
    "quantised": (
        lambda folder: change_tensors(folder, "q_proj", torch.zeros(32, 32, dtype=torch.int8)),
        "is stored as I8; quantised weights cannot be trained",
    ),
    "no index": (lambda folder: (folder / INDEX).unlink(), "has neither model.safetensors nor model.safetensors.index"),
    "a file missing": (
        lambda folder: next(folder.glob("*.safetensors")).unlink(),
        r"model-0000.-of-0000..safetensors is missing; copy it again",
    ),
    "a file cut off": (
        lambda folder: cut_off(next(folder.glob("*.safetensors"))),
        "is cut off, or its header is wrong about",
    ),
    "a file elsewhere": (
        lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}'),
        "does not name up to 4096 .safetensors files beside it",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "a config of something else": (
        lambda folder: (folder / "config.json").write_text("{}"),
        "model.family: '' is given, but model.pretrained is a None",
    ),
}


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_folder_that_cannot_be_is_refused_by_name(copied: Path, spoiled: str) -> None:
    spoil, complaint = SPOILED[spoiled]
    spoil(copied)
    with pytest.raises(ValueError, match=complaint):
        load(copied)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"model.pretrained: there is no folder '/no/such/folder' on this node"):
        load("/no/such/folder")


@pytest.mark.parametrize(("of", "key"), [(WeightFiles, "model.pretrained"), (AdapterFiles, "adapter.pretrained")])
def test_a_revision_that_the_hub_does_not_have_is_named(
    of: type[WeightFiles], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object, **__: object) -> None:
        answer: Any = SimpleNamespace(headers={}, request=None)
        raise RevisionNotFoundError("404", response=answer)

    monkeypatch.setattr(HfApi, "model_info", asked)
    with pytest.raises(ValueError, match=r"^\S+ owner/base has no revision 'v9' on the .*") as told:
        of("owner/base@v9")
    assert str(told.value) == (
        f"{key}: owner/base has no revision 'v9' on the Hugging Face hub; name one of its commits, tags or branches after the @, "
        "or leave it out"
    )


def test_tied_parameters_that_differ_are_refused(tmp_path: Path) -> None:
    save(tmp_path, shards="1GB")
    change_config(tmp_path, tie_word_embeddings=True)
    model = load(tmp_path)
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight and lm_head.weight differ, .* set tie_word_embeddings = false"
    ):
        model.initial_parameters(model.buckets[-1], seed=1)


def test_a_tokenizer_of_another_vocabulary_is_refused(llama: Path, tmp_path: Path) -> None:
    own = make_tokenizer(tmp_path / "own", "some text to learn tokens from")
    other = make_tokenizer(tmp_path / "other", "quite different words, as it happens")
    save(tmp_path / "own", vocab_size=300, **CONFIGS["llama"])
    spec = plan_pb2.Run.Model(pretrained=own)
    sample = Sample((12,), torch.int64, 300)
    load_model(spec, sample, (), load_tokenizer(own))
    for wrong in (load_tokenizer(other), Bytes()):
        with pytest.raises(
            ValueError, match=r"data.tokenizer: its vocabulary \(\d+ tokens\) is not that of .*; set data.tokenizer = "
        ):
            load_model(spec, Sample((12,), torch.int64, wrong.size), (), wrong)
    with pytest.raises(
        ValueError, match=r"data.tokenizer: 'bytes' makes 256 .*, but .* knows only 61 .*; leave data.tokenizer out"
    ):
        load_model(plan_pb2.Run.Model(pretrained=str(llama)), Sample((12,), torch.int64, 256), (), Bytes())


def test_a_tokenizer_that_makes_more_ids_than_its_own_weights_know_is_named(tmp_path: Path) -> None:
    """Code Llama's makes 16 more than the 32,000 that its weights know."""
    own = make_tokenizer(tmp_path / "own", "some text to learn tokens from")
    save(tmp_path / "own", **CONFIGS["llama"], vocab_size=260)
    with pytest.raises(
        ValueError,
        match=r"model.pretrained: the tokenizer of '.*own' makes \d+ different tokens, but .* know only 260 \(",
    ):
        load_model(plan_pb2.Run.Model(pretrained=own), Sample((12,), torch.int64, 300), (), load_tokenizer(own))
