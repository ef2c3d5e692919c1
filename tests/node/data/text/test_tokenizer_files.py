"""A tokenizer that comes home makes the ids that the run was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from dtfm.node.data.text.tokenizer import Bytes, check_vocabulary, load_tokenizer
from dtfm.node.data.text.tokenizer_files import with_older_names
from tests.tokenizer import make_tokenizer

TEXT = "def main() -> None:\n\treturn  'Größe 你好 🎉'\r\n"


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    Bytes().save(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(of_bytes: Path) -> Any:
    return AutoTokenizer.from_pretrained(of_bytes)


@given(st.text())
def test_the_bytes_of_any_text_are_its_ids_and_back(loaded: Any, text: str) -> None:
    for special in (True, False):
        ids = loaded(text, add_special_tokens=special)["input_ids"]
        assert ids == list(text.encode())
    assert loaded.decode(ids) == text
    assert Bytes().encode(text).tolist() == ids


def test_ids_that_are_no_text_are_decoded_as_the_run_does(loaded: Any) -> None:
    for ids in ([0xFF], [0xE4, 0xBD], [*range(256)]):
        assert loaded.decode(ids) == Bytes().decode(np.array(ids))


def test_a_run_goes_on_from_the_export_with_either_tokenizer(of_bytes: Path) -> None:
    assert len(load_tokenizer(str(of_bytes)).vocabulary()) == 256
    for tokenizer in (Bytes(), load_tokenizer(str(of_bytes))):
        check_vocabulary(str(of_bytes), 256, tokenizer)
        assert tokenizer.separator == (10,)
        assert tokenizer.encode(TEXT).tolist() == list(TEXT.encode())


def test_the_files_name_a_class_that_all_know_and_no_place_on_this_machine(tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "first", TEXT))
    tokenizer.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(tmp_path / "saved")
    run = load_tokenizer(str(tmp_path / "saved"))
    run.save(tmp_path / "home")
    config = json.loads((tmp_path / "home/tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<|im_start|>"]
    assert "extra_special_tokens" not in config
    assert str(tmp_path) not in "".join(file.read_text() for file in (tmp_path / "home").iterdir())
    again: Any = AutoTokenizer.from_pretrained(tmp_path / "home")
    assert again(TEXT + "<|im_start|>")["input_ids"] == tokenizer(TEXT + "<|im_start|>")["input_ids"]
    assert run.special_ids == {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def test_classes_that_decide_how_a_text_begins_are_told() -> None:
    named = {"tokenizer_class": "LlamaTokenizer", "is_local": True}
    told = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    assert with_older_names(named, adds_bos=True, adds_eos=False) == told
    named = {"tokenizer_class": "Qwen2Tokenizer"}
    assert with_older_names(named, adds_bos=True, adds_eos=False) == named
