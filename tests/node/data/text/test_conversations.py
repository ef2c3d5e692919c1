"""Conversations: what the tokenizer's chat template makes of them, of which the assistant's parts alone are learnt.

transformers is the judge. Its apply_chat_template says which tokens the whole text has, and, of a template in which the
assistant's parts are marked, which of these tokens are the assistant's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer

from dtfm.node.data import tokens
from dtfm.node.data.dataset import Data
from dtfm.node.data.load import load_data
from dtfm.node.data.reading.messages import conversation_of
from dtfm.node.data.reading.sources import Source, conversations
from dtfm.node.data.samples import NOT_LEARNT
from dtfm.node.data.text.tokenizer import load_tokenizer
from dtfm.protos import plan_pb2
from tests.tokenizer import TURNS, add_tokens, change_config, make_metaspace_tokenizer, make_tokenizer

BEGIN, END = "{% generation %}", "{% endgeneration %}"
MARKED = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set said %}{{ m.content or '' }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.tool_calls %}<call>{{ m.tool_calls | tojson }}</call>{% endif %}<|im_end|>\n{% endset %}"
    "{% if m.role == 'assistant' %}" + BEGIN + "{{ said }}" + END + "{% else %}{{ said }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that marks what the assistant writes."""
TEMPLATE = MARKED.replace(BEGIN, "").replace(END, "")
LAST_THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH = 8
PLAIN = {"add_special_tokens": False}
WORDS = "<|im_start|>user\nWhat is it? four and three, thanks. seven; be brief<|im_end|>\n" * 3


def message(role: str, content: str | None = None, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [
    message("system", "be brief"),
    message("user", "two and two?"),
    message("assistant", "four"),
    message("user", "and three?"),
    message("assistant", "seven é"),
    message("user", "thanks"),
]
CALL = {"type": "function", "function": {"name": "temperature", "arguments": {"place": "Bergen"}}}
TOOLS = [{"type": "function", "function": {"name": "temperature", "parameters": {"type": "object", "properties": {}}}}]


def with_template(folder: Path, kind: str, template: str | None = TEMPLATE) -> str:
    """A tokenizer of this kind: "bytes" for byte-level BPE, otherwise where Metaspace puts a space in front."""
    if kind == "bytes":
        make_tokenizer(folder, WORDS)
        add_tokens(folder, TURNS)
    else:
        make_metaspace_tokenizer(folder, WORDS, kind)
    return change_config(folder, **({"chat_template": template} if template else {}))


@pytest.fixture(scope="module", params=["bytes", "first", "always", "never"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_template(tmp_path_factory.mktemp("talks"), request.param)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_template(tmp_path_factory.mktemp("metaspace"), "first")


def write(folder: Path, *records: object) -> str:
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def load(folder: Path, tokenizer: str, *records: object, length: int = LENGTH) -> Data:
    data = plan_pb2.Run.Data(
        source=write(folder, *records),
        tokenizer=tokenizer,
        sequence_length=length,
        text_field="messages",
        evaluation_fraction=0.1,
    )
    return load_data(plan_pb2.Run(data=data), cache=folder / "cache")


def read(folder: Path, tokenizer: str, *records: object) -> list[tuple[int, bool]]:
    """The ids of all records in order, and whether each is learnt."""
    loaded = load_tokenizer(tokenizer)
    made = tokens.conversation_tokens(conversations(Source(write(folder, *records), "messages")), loaded)
    return [(int(id) % loaded.size, bool(id < loaded.size)) for each in made for id in each]


def judged(
    tokenizer: str, messages: Sequence[object], tools: object = None, marked: str = MARKED
) -> list[tuple[int, bool]]:
    """The ids of the whole conversation, and which are the assistant's, as transformers says. Of several tokens that share the
    last character it says so of the first alone."""
    judge: Any = AutoTokenizer.from_pretrained(tokenizer)
    made = judge.apply_chat_template(
        messages, tools=tools, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    assert made["input_ids"] == judge.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
    found = [bool(is_learnt) for is_learnt in made["assistant_masks"]]
    places = judge(
        judge.apply_chat_template(messages, tools=tools, tokenize=False), return_offsets_mapping=True, **PLAIN
    )
    for number, (before, place) in enumerate(pairwise(places["offset_mapping"]), start=1):
        found[number] |= found[number - 1] and place == before
    return [*zip(made["input_ids"], found, strict=True)]


def learnt(found: Sequence[tuple[int, bool]], tokenizer: str) -> str:
    return load_tokenizer(tokenizer).decode(np.array([id for id, is_learnt in found if is_learnt]))


CONVERSATIONS = {
    "several turns": {"messages": TALK},
    "calls": {
        "messages": [
            message("user", "How warm is it?"),
            message("assistant", "", tool_calls=[CALL]),
            message("tool", "9 C", name="temperature"),
            message("assistant", "It is 9 degrees."),
        ],
        "tools": TOOLS,
    },
    "calls without content": {"messages": [message("user", "Call."), message("assistant", None, tool_calls=[CALL])]},
    "calls without the key": {
        "messages": [message("user", "Call."), {"role": "assistant", "tool_calls": [CALL, CALL]}]
    },
    "reasoning": {"messages": [message("user", "2+3?"), message("assistant", "5", reasoning_content="two and three")]},
    "an answer first": {"messages": [message("assistant", "hello"), *TALK[1:]]},
    "two answers in a row": {"messages": [*TALK[:3], message("assistant", "four, I said")]},
    "spaces and line ends": {"messages": [message("user", " a\n"), message("assistant", "\n\n b  c \n")]},
}


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_assistants_tokens_of_the_whole_text_are_learnt(
    name: str, marked: bool, tokenizer: str, tmp_path: Path
) -> None:
    record = CONVERSATIONS[name]
    if marked:
        kind = load_tokenizer(tokenizer)
        kind.save(tmp_path)
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer = change_config(tmp_path, chat_template=MARKED)
    assert read(tmp_path, tokenizer, record) == judged(tokenizer, record["messages"], record.get("tools"))


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
    metaspace: str, tmp_path_factory: pytest.TempPathFactory, talks: list[list[dict[str, Any]]]
) -> None:
    loaded = load_tokenizer(metaspace)
    stream: list[tuple[int, bool]] = []
    for number, talk in enumerate(talks):
        stream += [(end, False) for end in loaded.separator] if number else []
        stream += judged(metaspace, talk)
    windows = [stream[at : at + LENGTH + 1] for at in range(0, len(stream) - LENGTH, LENGTH)]
    expected = [
        ([id for id, _ in window[:-1]], [id if learnt else NOT_LEARNT for id, learnt in window[1:]])
        for window in windows
        if any(learnt for _, learnt in window[1:])
    ]
    data = load(tmp_path_factory.mktemp("windows"), metaspace, *({"messages": talk} for talk in talks))
    assert data.training_count + data.evaluation_count == len(expected)
    found = [
        (inputs.tolist(), labels.tolist())
        for batch, count in ((data.training_batch, data.training_count), (data.evaluation_batch, data.evaluation_count))
        for inputs, labels in zip(*batch(np.arange(count)), strict=True)
    ]
    assert sorted(found) == sorted(expected)


def test_content_in_parts_is_its_text(tokenizer: str, tmp_path: Path) -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Name "}, {"type": "text", "text": "a colour."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Green."}]},
    ]
    plain = [message("user", "Name a colour."), message("assistant", "Green.")]
    assert read(tmp_path, tokenizer, {"messages": parts}) == judged(tokenizer, plain)


def test_sharegpts_form_is_read(tokenizer: str, tmp_path: Path) -> None:
    record = {
        "system": "be brief",
        "tools": json.dumps(TOOLS),
        "conversations": [
            {"from": "human", "value": "How warm is it?"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "9 C"},
            {"from": "gpt", "value": "It is 9 degrees."},
        ],
    }
    messages = [
        message("system", "be brief"),
        message("user", "How warm is it?"),
        message("assistant", tool_calls=[CALL]),
        message("tool", "9 C"),
        message("assistant", "It is 9 degrees."),
    ]
    assert read(tmp_path, tokenizer, record) == judged(tokenizer, messages, TOOLS)


def test_a_folder_of_the_package_datasets_gives_no_key_that_a_record_has_not(tmp_path: Path, metaspace: str) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    other = {"type": "function", "function": {"name": "ring", "arguments": {"times": 3}}}
    talks = [[message("user", "Call."), message("assistant", "", tool_calls=[call])] for call in (CALL, other)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    made = tokens.conversation_tokens(conversations(Source(f"hf:{folder}", "messages")), load_tokenizer(metaspace))
    size = load_tokenizer(metaspace).size
    found = [int(id) % size for each in made for id in each]
    first, second = ([id for id, _ in judged(metaspace, talk)] for talk in talks)
    assert found == [*first, *load_tokenizer(metaspace).separator, *second]


def test_each_turn_is_learnt_as_it_is_asked_for_when_the_template_drops_earlier_thinking(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thinking = with_template(tmp_path / "tokenizer", "first", LAST_THINKS)
    talk = [
        message("user", "a?"),
        message("assistant", "b", reasoning_content="one"),
        message("user", "c?"),
        message("assistant", "d", reasoning_content="two"),
        message("user", "thanks"),
    ]
    found = read(tmp_path, thinking, {"messages": talk}, {"messages": talk[:2]})
    judge: Any = AutoTokenizer.from_pretrained(thinking)
    texts = [judge.apply_chat_template(talk[:count], tokenize=False) for count in (2, 4, 2)]
    asked = [judge.apply_chat_template(talk[:count], tokenize=False, add_generation_prompt=True) for count in (1, 3, 1)]
    ids = [[*judge(text, add_special_tokens=False)["input_ids"], judge.eos_token_id] for text in texts]
    assert [id for id, _ in found] == [id for each in ids for id in each][:-1]
    assert learnt(found, thinking) == "".join(text[len(before) :] for text, before in zip(texts, asked, strict=True))
    assert (
        "1 of 2 conversations: each turn of these is learnt in a text of its own that ends with it, 2 texts in all"
        in (caplog.text)
    )


def test_turns_share_a_text_as_long_as_the_template_writes_them_alike(tmp_path: Path) -> None:
    """Calls and what came of them belong to one turn: only the next question changes how they are written."""
    template = LAST_THINKS.replace("loop.last", "loop.index0 > ns.asked")
    asked = (
        "{% set ns = namespace(asked=0) %}{% for m in messages if m.role == 'user' %}"
        "{% set ns.asked = messages.index(m) %}{% endfor %}"
    )
    name = with_template(tmp_path / "tokenizer", "bytes", asked + template)
    talk = [
        message("user", "a?"),
        message("assistant", "b", reasoning_content="one"),
        message("tool", "9"),
        message("assistant", "c", reasoning_content="two"),
        message("user", "d?"),
        message("assistant", "e", reasoning_content="three"),
    ]
    first, second = load_tokenizer(name).render(conversation_of({"messages": talk}, "here"))
    assert [first.text[begin:end] for begin, end in first.learnt] == [
        "<think>one</think>b<|im_end|>\n",
        "<think>two</think>c<|im_end|>\n",
    ]
    assert [second.text[begin:end] for begin, end in second.learnt] == ["<think>three</think>e<|im_end|>\n"]
    assert "<think>one" not in second.text


def test_a_prompt_that_asks_for_more_than_the_template_writes_of_an_answer(tmp_path: Path) -> None:
    asks = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}")
    name = with_template(tmp_path / "tokenizer", "bytes", asks)
    for answer in ("four", "<b>four</b>"):
        (text,) = load_tokenizer(name).render(
            conversation_of({"messages": [*TALK[:2], message("assistant", answer)]}, "here")
        )
        assert [text.text[begin:end] for begin, end in text.learnt] == [f"{answer}<|im_end|>\n"]


def test_what_is_not_learnt_does_not_count_in_the_entropy(tmp_path: Path, metaspace: str) -> None:
    talk = [message("user", "all kinds of words, never learnt"), message("assistant", "")]
    plain: Any = load(tmp_path, metaspace, *[{"messages": talk}] * 30)
    # Answers are "<|im_end|>\n" alone, so few different tokens are learnt.
    assert 0 < plain.unigram_entropy <= np.log(len(load_tokenizer(metaspace).encode("<|im_end|>\n")))


def test_the_numbers_of_learnt_labels_are_known_before_the_samples_are_trained(tmp_path: Path, metaspace: str) -> None:
    data = load(tmp_path, metaspace, *[{"messages": TALK}] * 30)
    training, held_out = np.arange(data.training_count), np.arange(data.evaluation_count)
    for some in (training, training[::3], training[5:6], np.append(training, training[:2])):
        assert data.training_learnt(some) == int((data.training_batch(some)[1] != NOT_LEARNT).sum())
    assert data.evaluation_learnt(held_out) == int((data.evaluation_batch(held_out)[1] != NOT_LEARNT).sum())
    assert data.training_learnt(training) < data.training_count * LENGTH


ANSWER = message("assistant", "x")


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"text": "x"}, " has no list called 'messages' or 'conversations'; set data.text_field"),
        ({"messages": []}, " has no list called 'messages'"),
        ([], " is list, not an object"),
        ({"messages": ["x"]}, 'message 1: a message must have a "role"'),
        ({"messages": [{"role": 3, "content": "x"}]}, 'message 1: a message must have a "role"'),
        ({"messages": [message("user", "x")]}, ' has no message of the role "assistant"'),
        ({"messages": [message("user"), ANSWER]}, r"message 1 \('user'\) has no content"),
        (
            {"messages": [message("user", "x"), message("assistant")]},
            r"message 2 \('assistant'\) has no content.*leave",
        ),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "message 1: its content is int; give text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, ANSWER]},
            "message 1 has a part of the type 'image_url', which a model of text cannot read; leave the line out",
        ),
        (
            {"conversations": [{"from": "martian", "value": "x"}]},
            "message 1 is from 'martian'; \"from\" must be one of human",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "x"}]},
            'message 1 is from "function_call", but its value',
        ),
        ({"conversations": [{"from": "gpt"}]}, r"message 1 \('assistant'\) has no content"),
        ({"messages": [ANSWER], "tools": "x"}, ': "tools" must be a list of objects'),
        ({"messages": [ANSWER], "tools": {"name": "x"}}, ': "tools" must be a list of objects'),
    ],
)
def test_a_record_that_is_no_conversation_is_named(
    tmp_path: Path, metaspace: str, record: object, complaint: str
) -> None:
    with pytest.raises(ValueError, match=rf"data.source: .*talks.jsonl, line 2.*{complaint}"):
        load(tmp_path, metaspace, {"messages": TALK}, record)


def test_the_field_of_sharegpt_is_no_text_field(tmp_path: Path) -> None:
    source = write(tmp_path, {"conversations": [{"from": "gpt", "value": "x"}]})
    run = plan_pb2.Run.Data(source=source, tokenizer="bytes", sequence_length=8, text_field="conversations")
    with pytest.raises(
        ValueError, match=r"line 1: field 'conversations' holds list.*text_field to 'messages' for conv"
    ):
        load_data(plan_pb2.Run(data=run))


NO_CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}</>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "talk", "complaint"),
    [
        (
            "{% for m in messages|reverse %}<{{ m.role }}>{{ m.content }}</>{% endfor %}",
            TALK,
            r"renders questions differently once they are answered.*talks.jsonl, line 1\)",
        ),
        (NO_CALLS, [*TALK, message("assistant", "", tool_calls=[CALL])], "does not write 'tool_calls'.*line 1"),
        (NO_CALLS.replace("m.content", "m.text"), TALK, "does not write 'content'.*line 1"),
        ("{{ raise_exception('odd') }}", TALK, r"does not take the conversation \(.*odd.*line 1"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", TALK, "does not write 'content'"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            [TALK[1], message("assistant", "")],
            "writes nothing of the assistant's messages.*line 1",
        ),
    ],
)
def test_a_template_that_does_not_write_the_answers_is_refused(
    template: str, talk: list[Any], complaint: str, tmp_path: Path
) -> None:
    name = with_template(tmp_path / "tokenizer", "bytes", template)
    with pytest.raises(ValueError, match=f"data.tokenizer: its chat template {complaint}"):
        load(tmp_path, name, {"messages": talk})


def test_what_a_template_leaves_out_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = with_template(tmp_path / "tokenizer", "bytes", NO_CALLS)
    talk = [TALK[1], message("assistant", "four", reasoning_content="two and two")]
    with caplog.at_level(logging.WARNING):
        read(tmp_path, name, *[{"messages": talk, "tools": TOOLS}] * 3)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("dtfm")]
    assert [text.partition(" (")[0] for text in said] == [
        f"the chat template of data.tokenizer leaves out {part!r}" for part in ("reasoning_content", "tools")
    ]
    assert all("talks.jsonl, line 1)" in text for text in said)


def test_a_conversation_may_begin_with_an_answer(tmp_path: Path) -> None:
    strict = "{% if not messages %}{{ raise_exception('no messages') }}{% endif %}" + TEMPLATE
    record = CONVERSATIONS["an answer first"]
    name = with_template(tmp_path / "tokenizer", "bytes", strict)
    assert read(tmp_path, name, record) == judged(name, record["messages"])


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    for name in ("bytes", with_template(tmp_path / "none", "bytes", None)):
        with pytest.raises(ValueError, match=r"data.tokenizer: .*template.*talks.jsonl, line 1"):
            load(tmp_path, name, {"messages": TALK})


def test_another_template_is_another_reading(tmp_path: Path, metaspace: str) -> None:
    other = with_template(tmp_path / "other", "first", TEMPLATE.replace("<|im_end|>\n", "<|im_end|>"))
    first, second = (load(tmp_path, name, *[{"messages": TALK}] * 3) for name in (metaspace, other))
    assert first.fingerprint != second.fingerprint
