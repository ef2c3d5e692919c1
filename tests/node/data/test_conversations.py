"""Conversations: the tokenizer's chat template, and labels for the answers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dtfm.node.data.dataset import Data, load_data
from dtfm.node.data.samples import NOT_LEARNT
from dtfm.node.data.tokenizer import Pretrained, load_tokenizer
from dtfm.protos import plan_pb2
from tests.tokenizer import make_tokenizer

TEMPLATE = "{% for m in messages %}<{{m.role}}>{{m.content}}</>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
FORGETFUL = (
    "{% for m in messages %}{% if m.role=='user' or loop.last %}<{{m.role}}>{{m.content}}</>{% endif %}{% endfor %}"
)
LENGTH = 8


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [
    message("system", "be brief"),
    message("user", "two and two?"),
    message("assistant", "four"),
    message("user", "and three?"),
    message("assistant", "seven"),
    message("user", "thanks"),
]


def folder_with(folder: Path, template: str | None = TEMPLATE) -> str:
    name = make_tokenizer(folder / "tokenizer", TEMPLATE)
    file = folder / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ({"chat_template": template} if template else {})))
    return name


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_with(tmp_path_factory.mktemp("talks"))


def load(folder: Path, tokenizer: str, *talks: object, length: int = LENGTH) -> Data:
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    data = plan_pb2.Run.Data(
        source=str(folder / "talks.jsonl"),
        tokenizer=tokenizer,
        sequence_length=length,
        text_field="messages",
        evaluation_fraction=0.1,
    )
    return load_data(plan_pb2.Run(data=data), cache=folder / "cache")


def test_a_conversation_is_rendered_by_the_template_and_answers_are_told_from_the_rest(tokenizer: str) -> None:
    pieces = load_tokenizer(tokenizer).render(TALK)
    assert pieces == [
        ("<system>be brief</>\n<user>two and two?</>\n<assistant>", False),
        ("four</>\n", True),
        ("<user>and three?</>\n<assistant>", False),
        ("seven</>\n", True),
        ("<user>thanks</>\n", False),
    ]


words = st.text(alphabet="ab c\n<>é", max_size=20)
talks = st.lists(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), words), max_size=4).map(
        lambda turns: [message("user", "?"), *(message(*turn) for turn in turns), message("assistant", "!")]
    ),
    min_size=6,
    max_size=12,
)


@settings(max_examples=settings().max_examples // 2)
@given(talks=talks)
def test_labels_are_the_next_tokens_where_they_are_learnt(
    tokenizer: str, tmp_path_factory: pytest.TempPathFactory, talks: list[list[dict[str, str]]]
) -> None:
    loaded = load_tokenizer(tokenizer)
    stream: list[tuple[int, bool]] = []
    for number, talk in enumerate(talks):
        stream += [(end, False) for end in loaded.separator] if number else []
        stream += [(int(id), learnt) for text, learnt in loaded.render(talk) for id in loaded.encode(text)]
    windows = [stream[at : at + LENGTH + 1] for at in range(0, len(stream) - LENGTH, LENGTH)]
    expected = [
        ([id for id, _ in window[:-1]], [id if learnt else NOT_LEARNT for id, learnt in window[1:]])
        for window in windows
        if any(learnt for _, learnt in window[1:])
    ]
    data = load(tmp_path_factory.mktemp("windows"), tokenizer, *talks)
    assert data.training_count + data.evaluation_count == len(expected)
    found = [
        (inputs.tolist(), labels.tolist())
        for batch, count in ((data.training_batch, data.training_count), (data.evaluation_batch, data.evaluation_count))
        for inputs, labels in zip(*batch(np.arange(count)), strict=True)
    ]
    assert sorted(found) == sorted(expected)


def test_what_is_not_learnt_does_not_count_in_the_entropy(tmp_path: Path, tokenizer: str) -> None:
    talk = [message("user", "all kinds of words, never learnt"), message("assistant", "")]
    plain: Any = load(tmp_path, tokenizer, *[talk] * 30)
    # Answers are "</>\n" alone, so few different tokens are learnt.
    assert 0 < plain.unigram_entropy <= np.log(len(load_tokenizer(tokenizer).encode("</>\n")))


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"text": "x"}, "line 1 has no list called 'messages'; set data.text_field"),
        ({"messages": []}, "line 1 has no list called 'messages'"),
        ({"messages": ["x"]}, 'line 1: each message must have a "role" and a "content", both text'),
        ({"messages": [message("user", "x")]}, 'line 1 has no message of the role "assistant"'),
    ],
)
def test_a_record_that_is_no_conversation_is_named(
    tmp_path: Path, tokenizer: str, record: object, complaint: str
) -> None:
    data = load(tmp_path, tokenizer, *[TALK] * 3)
    assert data.training_count
    (tmp_path / "talks.jsonl").write_text(json.dumps(record) + "\n")
    run = plan_pb2.Run.Data(
        source=str(tmp_path / "talks.jsonl"), tokenizer=tokenizer, sequence_length=8, text_field="messages"
    )
    with pytest.raises(ValueError, match=complaint):
        load_data(plan_pb2.Run(data=run))


def test_a_template_that_cannot_tell_the_answers_is_refused(tmp_path: Path) -> None:
    forgetful = folder_with(tmp_path / "forgetful", FORGETFUL)
    with pytest.raises(
        ValueError, match=r"renders earlier turns differently when others follow.*talks.jsonl, line 1\)"
    ):
        load(tmp_path, forgetful, TALK)


def test_a_conversation_may_begin_with_an_answer(tmp_path: Path) -> None:
    strict = "{% if not messages %}{{ raise_exception('no messages') }}{% endif %}" + TEMPLATE
    talk = [message("assistant", "hello"), message("user", "hi"), message("assistant", "how are you?")]
    assert load_tokenizer(folder_with(tmp_path, strict)).render(talk) == [
        ("<assistant>hello</>\n", True),
        ("<user>hi</>\n<assistant>", False),
        ("how are you?</>\n", True),
    ]


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    for name in ("bytes", folder_with(tmp_path / "none", None)):
        with pytest.raises(ValueError, match=r"data.tokenizer: .*template"):
            load(tmp_path, name, TALK)


def test_another_template_is_another_reading(tmp_path: Path, tokenizer: str) -> None:
    other = folder_with(tmp_path / "other", TEMPLATE.replace("</>", "<.>"))
    first, second = load(tmp_path, tokenizer, *[TALK] * 3), load(tmp_path, other, *[TALK] * 3)
    assert isinstance(first.tokenizer, Pretrained)
    assert first.fingerprint != second.fingerprint
