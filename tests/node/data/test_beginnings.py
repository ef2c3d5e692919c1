"""Documents begin and end as their tokenizer has it, and their tokens do not depend on how text is cut for reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from dtfm.node.data import tokens
from dtfm.node.data.load import load_data
from dtfm.node.data.reading import sources
from dtfm.node.data.text.tokenizer import Pretrained, load_tokenizer
from dtfm.node.model.generate_text import prompt_ids
from dtfm.protos import plan_pb2
from tests.tokenizer import change_config, make_metaspace_tokenizer, make_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog\n"
DOCUMENTS = [TEXT * 3, "one two three", TEXT]


def adds(folder: Path, template: str) -> str:
    """A tokenizer whose tokenizer.json puts tokens around each text: "<s> $A" for example."""
    make_metaspace_tokenizer(folder, TEXT)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=special
    )
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def read(tokenizer: str, documents: list[str] = DOCUMENTS) -> list[int]:
    made = tokens.text_tokens(([text] for text in documents), load_tokenizer(tokenizer))
    return [int(id) for each in made for id in each]


def ids(tokenizer: str, text: str, **more: Any) -> list[int]:
    judge: Any = AutoTokenizer.from_pretrained(tokenizer)
    return list(judge(text, **more)["input_ids"])


BEGIN, END = 1, 2


@pytest.mark.parametrize(
    ("template", "between"),
    [("$A", [END]), ("<s> $A", [END]), ("<s> $A </s>", []), ("$A </s>", []), ("</s> $A", [])],
)
def test_each_document_is_what_the_tokenizer_makes_of_it(template: str, between: list[int], tmp_path: Path) -> None:
    """The token that ends a text stands between two, unless the tokenizer puts it there itself."""
    name = adds(tmp_path / "tokenizer", template)
    first, *others = (ids(name, text) for text in DOCUMENTS)
    assert read(name) == sum((between + each for each in others), first)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    data = load_data(
        plan_pb2.Run(
            data=plan_pb2.Run.Data(
                source=str(tmp_path / "a.jsonl"), tokenizer=name, sequence_length=4, text_field="text"
            )
        )
    )
    whole = read(name)
    assert sorted(data._take(np.arange(data.training_count + data.evaluation_count))[0].tolist()) == sorted(
        whole[at : at + 4] for at in range(0, len(whole) - 4, 4)
    )


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_a_config_that_adds_a_token_is_believed(kind: str, tmp_path: Path) -> None:
    """transformers 5 reads add_bos_token only where there is no tokenizer.json. The model was trained with the token."""
    folder = tmp_path / "tokenizer"
    make_metaspace_tokenizer(folder, TEXT, tokenizer_class=kind, add_bos_token=True, add_eos_token=True)
    first, *others = ([BEGIN, *ids(str(folder), text, add_special_tokens=False), END] for text in DOCUMENTS)
    assert read(str(folder)) == sum(others, first)
    change_config(folder, add_bos_token=False, add_eos_token=False)
    assert BEGIN not in read(str(folder))


def test_another_beginning_is_another_reading(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    make_metaspace_tokenizer(folder, TEXT)
    before = load_tokenizer(str(folder)).identity
    assert load_tokenizer(change_config(folder, add_bos_token=True)).identity != before


def test_isolated_documents_begin_with_their_first_token(tmp_path: Path) -> None:
    name = adds(tmp_path / "tokenizer", "<s> $A")
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 30)
    described = plan_pb2.Run.Data(
        source=str(tmp_path / "a.jsonl"),
        tokenizer=name,
        sequence_length=16,
        text_field="text",
        isolate_documents=True,
    )
    data = load_data(plan_pb2.Run(data=described))
    inputs = data._take(np.arange(5))[0]
    positions = data.positions(inputs)
    assert positions is not None
    assert (positions[inputs == BEGIN] == 0).all()
    assert (positions[inputs == END] > 0).all()


def test_a_prompt_begins_as_documents_do(tmp_path: Path) -> None:
    name = adds(tmp_path / "tokenizer", "<s> $A </s>")
    assert prompt_ids(load_tokenizer(name), "the dog").tolist() == ids(name, "the dog")[:-1]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_long_document_is_tokenized_as_if_it_were_never_cut(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_metaspace_tokenizer(tmp_path / "tokenizer", TEXT, scheme)
    monkeypatch.setattr(sources, "PIECE", 60)
    (tmp_path / "a.txt").write_text(TEXT * 40)
    made = tokens.text_tokens(sources.documents(sources.Source(str(tmp_path / "a.txt"))), load_tokenizer(name))
    assert [int(id) for each in made for id in each] == ids(name, TEXT * 40)


def qwen2(folder: Path, **config: Any) -> str:
    make_tokenizer(folder, "numbers 12345 67890 and accents é ü, cafe\u0301\n" * 9)
    return change_config(folder, tokenizer_class="Qwen2Tokenizer", **config)


def test_a_class_that_overrides_tokenizer_json_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Qwen2's class has a normalizer and a pattern of its own: numbers and accents become other tokens."""
    name = qwen2(tmp_path / "tokenizer")
    assert isinstance(load_tokenizer(name), Pretrained)
    assert "the class Qwen2Tokenizer makes other tokens of '" in caplog.text
    assert 'set "tokenizer_class" to "PreTrainedTokenizerFast"' in caplog.text
    caplog.clear()
    load_tokenizer(change_config(tmp_path / "tokenizer", tokenizer_class="PreTrainedTokenizerFast"))
    assert not caplog.text


def test_a_class_that_does_as_tokenizer_json_says_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_tokenizer(qwen2(tmp_path / "tokenizer")).save(tmp_path / "saved")
    caplog.clear()
    load_tokenizer(str(tmp_path / "saved"))
    assert not caplog.text
