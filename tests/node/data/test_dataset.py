"""Samples from text and from the user's own tensors."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dtfm.node.data import tokens as tokens_module
from dtfm.node.data.allowed import check_places, read_allowed
from dtfm.node.data.dataset import Data, entropy
from dtfm.node.data.load import load_data
from dtfm.node.data.reading import records, sources
from dtfm.node.data.reading.sources import Document, Source
from dtfm.node.data.text.tokenizer import Bytes, Tokenizer, load_tokenizer
from dtfm.protos import plan_pb2
from tests import convnet
from tests.convnet import SIDE
from tests.tokenizer import make_tokenizer

TEXT = "".join(f"line {number}: the quick brown fox jumps over the lazy dog\n" for number in range(40))


def load(source: str, tokenizer: str = "bytes", length: int = 16, fraction: float = 0.1, field: str = "text") -> Data:
    data = plan_pb2.Run.Data(
        source=source, tokenizer=tokenizer, sequence_length=length, text_field=field, evaluation_fraction=fraction
    )
    return load_data(plan_pb2.Run(data=data), ["tests.convnet", "tests.absent"])


def tokenize(texts: Iterable[Document], tokenizer: Tokenizer) -> NDArray[Any]:
    """All tokens of texts in order, as `load_data` writes them."""
    dtype = tokens_module.stored_dtype(tokenizer, is_marked=False)

    def write(file: BinaryIO) -> blake3:
        return tokens_module.write(tokens_module.text_tokens(texts, tokenizer), dtype, file)

    return tokens_module.stored(None, "", dtype, write, lasting=False)


def everything(data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of all samples, training first."""
    parts = [
        data.training_batch(np.arange(data.training_count)),
        data.evaluation_batch(np.arange(data.evaluation_count)),
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def test_every_token_of_the_text_is_predicted_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    data = load(str(tmp_path / "*.txt"))
    inputs, labels = everything(data)
    assert inputs.shape == labels.shape == (data.training_count + data.evaluation_count, 16)
    assert inputs.dtype == labels.dtype == torch.int64
    windows = sorted(bytes([*x[:1], *y]) for x, y in zip(inputs.tolist(), labels.tolist(), strict=True))
    raw = TEXT.encode()
    assert windows == sorted(raw[at : at + 17] for at in range(0, len(raw) - 16, 16))
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert (data.sample.shape, data.sample.vocabulary, data.tokens_per_sample) == ((16,), 256, 16)


def test_all_labels_of_text_are_learnt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    data = load(str(tmp_path / "*.txt"))
    assert data.training_learnt(np.arange(3)) == data.evaluation_learnt(np.zeros(3, dtype=np.int64)) == 3 * 16


def test_documents_come_in_order_with_a_separator_between(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("x" * 40)
    (tmp_path / "a.txt").write_text("y" * 40)
    (tmp_path / "c.jsonl").write_text('{"text": "zzz"}\n\n{"text": "www"}\n')
    tokens = tokenize(sources.documents(Source(str(tmp_path / "*"))), load_tokenizer("bytes"))
    assert tokens.tobytes().decode() == "y" * 40 + "\n" + "x" * 40 + "\nzzz\nwww"


@given(text=st.text(alphabet=st.sampled_from("ab\n\r€𝄞"), min_size=0, max_size=200))
def test_reading_in_pieces_loses_nothing(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "a.txt").write_bytes(text.encode())
    (folder / "b.jsonl").write_text(json.dumps({"text": text}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "PIECE", 7)
        patch.setattr(sources, "PIECE", 7)
        for name in ("a.txt", "b.jsonl"):
            pieces = [piece for document in sources.documents(Source(str(folder / name))) for piece in document]
            assert "".join(pieces) == text
            assert all(len(piece) <= 14 for piece in pieces)


@given(texts=st.lists(st.lists(st.text("ab", max_size=9), max_size=3), max_size=6), at_once=st.integers(1, 30))
def test_it_does_not_matter_how_much_is_tokenized_at_once(texts: list[list[str]], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "_AT_ONCE", at_once)
        assert tokenize(texts, Bytes()).tobytes().decode() == "\n".join(map("".join, texts))


def test_the_standard_library_is_text_that_every_machine_has() -> None:
    data = load("python-stdlib", length=256)
    assert data.training_count > 10_000
    assert 2.5 < data.unigram_entropy < 4.0
    assert data.fingerprint == load("python-stdlib", length=256).fingerprint


class Numbers(Bytes):
    """A tokenizer whose tokens are numbers, of which it says that there are ``size``."""

    separator = (0,)

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(text)])


@pytest.mark.parametrize(("size", "dtype"), [(256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")])
def test_tokens_are_stored_in_as_few_bytes_as_hold_them(size: int, dtype: str) -> None:
    tokens = tokenize([["3", str(size - 1)]], Numbers(size))
    assert tokens.tolist() == [3, size - 1]
    assert tokens.dtype == np.dtype(dtype)


def test_an_id_that_the_tokenizer_should_not_make_is_refused() -> None:
    """Such an id would be trained on as another token's."""
    with pytest.raises(ValueError, match=r"data.tokenizer: it makes the id 300, but has only 300 tokens"):
        tokenize([["3", "300"]], Numbers(300))


def test_a_local_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT)
    data = load(str(tmp_path / "*.txt"), make_tokenizer(tmp_path / "tokenizer", TEXT))
    assert data.tokenizer is not None
    assert data.sample.vocabulary == data.tokenizer.size == 300
    assert data.tokenizer.decode(data.tokenizer.encode(TEXT)) == TEXT
    tokens = tokenize([[TEXT], [TEXT]], data.tokenizer)
    assert tokens.dtype == np.uint16
    assert tokens.tolist().count(0) == 1  # <end>, between the two
    assert len(tokens) < len(TEXT)


def test_documents_are_told_apart_by_the_token_that_ends_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"so many words " * n}"}}\n' for n in range(9)))
    tokenizer = make_tokenizer(tmp_path / "tokenizer", TEXT)

    def isolated(source: str, tokenizer: str, field: str = "text") -> Data:
        described = plan_pb2.Run.Data(source=source, tokenizer=tokenizer, sequence_length=16, text_field=field)
        described.evaluation_fraction, described.isolate_documents = 0.1, True
        return load_data(plan_pb2.Run(data=described), ["tests.convnet"])

    data, mixed = isolated(str(tmp_path / "a.jsonl"), tokenizer), load(str(tmp_path / "a.jsonl"), tokenizer)
    inputs, labels = data.training_batch(np.arange(data.training_count))
    assert all(map(torch.equal, (inputs, labels), mixed.training_batch(np.arange(data.training_count))))
    positions = data.positions(inputs)
    assert positions is not None
    assert (positions[:, 1:] == torch.where(inputs[:, 1:] == 0, 0, positions[:, :-1] + 1)).all()
    assert not positions[:, 0].any()
    assert (mixed.positions(inputs), mixed.sample.isolated) == (None, False)
    for source, name, field in (
        (str(tmp_path / "a.jsonl"), "bytes", "text"),
        (str(tmp_path / "a.jsonl"), tokenizer, "messages"),
        ("module:tests.convnet:images", "bytes", "text"),
    ):
        with pytest.raises(ValueError, match=r"data.isolate_documents: .*leave (it|isolate_documents) out"):
            isolated(source, name, field)


@pytest.mark.parametrize("kind", ["bytes", "local"])
def test_text_that_utf8_cannot_hold_is_replaced(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else make_tokenizer(tmp_path / "tokenizer", TEXT))
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    tokens = tokenize(sources.documents(Source(str(tmp_path / "a.jsonl"))), tokenizer)
    assert tokenizer.decode(tokens) == "a?b"


def test_a_local_folder_of_a_hub_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in TEXT.splitlines()))
    tokens = tokenize(sources.documents(Source(f"hf:{folder}", "body")), load_tokenizer("bytes"))
    assert tokens.tobytes().decode() == TEXT.rstrip("\n")
    with pytest.raises(ValueError, match=r"record 1 has no field 'text', only \['body'\]; set data.text_field"):
        load(f"hf:{folder}")


@pytest.mark.parametrize("named", ["{folder}/secret.txt", "../secret.txt", "{folder}/set-of-another/secret.txt"])
def test_a_hub_data_set_cannot_name_files_that_are_not_its_own(named: str, tmp_path: Path) -> None:
    for folder in ("set", "set-of-another"):
        (tmp_path / folder).mkdir()
    for secret in (tmp_path / "secret.txt", tmp_path / "set-of-another" / "secret.txt"):
        secret.write_text("secret\n")
    files = f"configs:\n- config_name: default\n  data_files: {named.format(folder=tmp_path)}\n"
    (tmp_path / "set" / "README.md").write_text(f"---\n{files}---\n")
    with pytest.raises(ValueError, match=r"cannot be loaded \(it names .*secret.txt, which is not part of it\)"):
        list(sources.documents(Source(f"hf:{tmp_path / 'set'}")))


def test_a_hub_data_set_without_the_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"-m pip install .*\[hub\]"):
        load("hf:anything")


def test_tensors_made_by_a_function() -> None:
    data = load("module:tests.convnet:images", fraction=0.25)
    assert (data.training_count, data.evaluation_count) == (192, 64)
    assert (data.sample.shape, data.sample.dtype, data.sample.vocabulary) == ((3, SIDE, SIDE), torch.float32, None)
    assert (data.tokens_per_sample, data.tokenizer) == (1, None)
    inputs, labels = data.evaluation_batch(np.array([0, 5]))
    assert (tuple(inputs.shape), tuple(labels.shape)) == ((2, 3, SIDE, SIDE), (2,))
    assert 1.2 < data.unigram_entropy <= math.log(4)  # all classes are held out, though every fourth image has the same


def test_fingerprints_tell_data_apart(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT.replace("39", "93"))
    same = [load(str(tmp_path / "a.txt")).fingerprint for _ in range(2)]
    others = [
        load(str(tmp_path / "b.txt")).fingerprint,
        load(str(tmp_path / "a.txt"), length=17).fingerprint,
        load(str(tmp_path / "a.txt"), fraction=0.2).fingerprint,
        load("module:tests.convnet:images").fingerprint,
        load("module:tests.convnet:images", fraction=0.2).fingerprint,
    ]
    assert len({*same, *others}) == 1 + len(others)
    assert all(len(fingerprint) == 32 for fingerprint in same)


def test_entropy_of_known_distributions() -> None:
    assert entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert entropy(np.array([0, 7])) == 0
    quarter = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert entropy(np.array([1, 3])) == pytest.approx(quarter)


def write(name: str, content: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / name).write_bytes(content)
        return str(folder / name)

    return make


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (lambda folder: str(folder / "*.txt"), r"data.source: no file matches '.*\*.txt'"),
        (write("a.pdf", b"x"), r"a.pdf is of no kind that is read here"),
        (write("a.txt", b"short"), r"has 5 tokens, too few for two windows of data.sequence_length 16"),
        (write("a.txt", b""), r"has 0 tokens"),
        (write("a.txt", b"caf\xe9 " * 20), r"a.txt is not UTF-8 text \(a byte 0xe9"),
        (write("a.jsonl", b'{"text": "a"}\n{"txet": "b"}\n'), r"a.jsonl, line 2 has no field 'text', only \['txet'\]"),
        (write("a.jsonl", b'{"text": "a"}\n{"text": 3}\n'), r"line 2: field 'text' holds int, not text"),
        (write("a.jsonl", b'{"text": "a"}\n\n{"text": \n'), r"line 3 is not JSON"),
        (write("a.jsonl", b"[1]\n"), r"line 1 is list, not an object"),
        (write("a.jsonl", b"[" * 100_000), r"line 1 is not JSON"),
        (write("a.jsonl", b'{"text": "\xff"}\n'), r"a.jsonl is not UTF-8 text"),
        (lambda _: "module:os:getcwd", r"data.source: this node does not run code from 'os:getcwd'.*--allow-module os"),
        (lambda _: "module:tests.convnet:absent", r"module 'tests.convnet' has no function 'absent'"),
        (
            lambda _: "module:tests.absent:images",
            r"'tests.absent' cannot be imported \(ModuleNotFoundError: .*install it",
        ),
        (lambda _: "module:tests.convnet:failing", r"data.source: tests.convnet:failing failed: ZeroDivisionError"),
        (lambda _: "module:tests.convnet", r"'tests.convnet' is not of the form package.module:function"),
        (lambda _: "module:tests.convnet:convnet", r"must return two tensors \(inputs, labels\), not Sequential"),
        (lambda folder: f"hf:{folder / 'absent'}", r"data.source: 'hf:.*absent' cannot be loaded"),
    ],
)
def test_data_that_cannot_be_read_is_named(
    source: Callable[[Path], str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convnet, "failing", lambda: 1 / 0, raising=False)
    with pytest.raises(ValueError, match=complaint):
        load(source(tmp_path))


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'data.tokenizer: .* cannot be loaded .*; give "bytes"'):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_mark_at_the_beginning_of_a_file_is_not_trained_on(name: str, tmp_path: Path) -> None:
    """Some editors of Windows write it: UTF-8 with a byte order mark."""
    content = '{"text": "abc"}\n' if name == "a.jsonl" else "abc"
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert tokenize(sources.documents(Source(str(tmp_path / name))), load_tokenizer("bytes")).tobytes() == b"abc"


def test_a_path_that_exists_is_taken_as_it_is_though_its_name_has_brackets(tmp_path: Path) -> None:
    folder = tmp_path / "[v2] texts"
    folder.mkdir()
    (folder / "a b.txt").write_text("abc")
    for source in (f"{folder}/a b.txt", f"{folder}/*.txt"):
        run = plan_pb2.Run(
            data=plan_pb2.Run.Data(source=source), checkpoint=plan_pb2.Run.Checkpoint(uri="coordinator:")
        )
        check_places(run, read_allowed([str(folder)]))
        assert tokenize(sources.documents(Source(source)), load_tokenizer("bytes")).tobytes() == b"abc"
