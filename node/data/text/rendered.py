"""Conversations as a model reads them: one text, and the characters of it that the model learns to write."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtfm.node.data.problems import in_one_line
from dtfm.node.data.reading.messages import Conversation, Message

log = logging.getLogger(__name__)

Span = tuple[int, int]
"""Characters [begin, end) of a text."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""In a template around what the assistant writes, as transformers finds it."""
_OTHER_FIRST = "\ue000"
"""A character that no answer begins with."""
_NEVER_WRITTEN = frozenset({"role", "name"})


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text to read whole. ``learnt``: the assistant's parts, in ascending order."""

    text: str
    learnt: tuple[Span, ...]


class ChatTemplate:
    """The chat template of a tokenizer of transformers, ``tokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._looked_at: set[tuple[str, bool]] = (
            set()
        )  # parts of messages that were looked for in a text, see _check_written

    def render(self, conversation: Conversation) -> list[Rendered]:
        """The texts of a conversation; together they have each message of the assistant's as learnt once.

        There is one text, unless the template renders an answer differently once other messages follow. Many templates drop
        the thinking of earlier turns. Then each turn is learnt in the text that ends with it, as a model is asked for it.

        Raises ValueError if the template does not take the conversation, or if answers cannot be told from the rest.
        """
        messages, tools = conversation.messages, conversation.tools
        found = list[Rendered]()
        text, learnt = "", list[Span]()
        for number, message in enumerate(messages, start=1):
            if message["role"] != "assistant":
                continue
            answered, spans = self._answered(messages[:number], tools)
            self._check_written(messages[:number], tools, answered, conversation.where)
            if not answered.startswith(text):
                found.append(Rendered(text, tuple(learnt)))
                learnt = []
            text = answered
            learnt += spans
        whole = self._text(messages, tools)
        found.append(Rendered(whole if whole.startswith(text) else text, tuple(learnt)))
        if not any(each.learnt for each in found):
            raise ValueError(
                "data.tokenizer: its chat template writes nothing of the assistant's messages, so that there is nothing to "
                "learn; use another template, or leave the conversation out"
            )
        return found

    def asked(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to where an answer begins. Raises ValueError."""
        return self._text(messages, None, add_generation_prompt=True)

    def _answered(self, messages: Sequence[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        """The text up to an answer, the last message, and where in it the answer is."""
        before = messages[:-1]
        answered = self._text(messages, tools)
        marks = self._marks(messages, tools)
        if marks is not None:
            begin = _alike(self._text(before, tools) if before else "", answered)
            return answered, [(max(first, begin), last) for first, last in marks if last > begin]
        asked = self._text(before, tools, add_generation_prompt=True) if before else answered
        begin = _alike(asked, answered)
        if begin < len(asked) and not answered.startswith(self._text(before, tools)):
            raise ValueError(
                "data.tokenizer: its chat template renders questions differently once they are answered, so that answers "
                "cannot be told from questions; use another template"
            )
        if (
            begin < len(asked) or not before
        ):  # the template asks for more than it writes, such as thinking; or nobody asks
            answer = messages[-1]
            others = {
                key: _OTHER_FIRST + value for key, value in ({"content": ""} | answer).items() if isinstance(value, str)
            }
            other = {**answer, **others, "role": answer["role"]}
            begin = min(begin, _alike(self._text([*before, other], tools), answered))
        return answered, [(begin, len(answered))] if begin < len(answered) else []

    def _text(
        self, messages: Sequence[Message], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as problem:  # whatever a template raises
            why = in_one_line(problem)
            raise ValueError(f"data.tokenizer: its chat template does not take the conversation ({why})") from problem

    def _marks(self, messages: Sequence[Message], tools: list[Any] | None) -> list[Span] | None:
        """What the template itself marks as the assistant's. None if it marks nothing anywhere."""
        template = self._tokenizer.get_chat_template(None, tools)
        if not _MARKED.search(template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        _, (marks,) = render_jinja_template(
            [list(messages)],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return [(begin, end) for begin, end in marks if begin < end]

    def _check_written(self, messages: Sequence[Message], tools: list[Any] | None, text: str, where: str) -> None:
        """Compares, for each kind of part when it first comes, with the text without it. Raises ValueError if the template
        leaves out what the assistant says; warns of other parts."""
        answer = messages[-1]
        parts = {key for key, value in answer.items() if value} - _NEVER_WRITTEN | ({"tools"} if tools else set())
        for part in sorted(parts):
            # Many templates write either the content or the calls.
            is_answer = part == "tool_calls" or (part == "content" and "tool_calls" not in answer)
            if (part, is_answer) in self._looked_at:
                continue
            self._looked_at.add((part, is_answer))
            try:
                if part == "tools":
                    without = self._text(messages, None)
                else:
                    empty = {"content": ""} if part == "content" else {}
                    without = self._text(
                        [*messages[:-1], {k: v for k, v in answer.items() if k != part} | empty], tools
                    )
            except ValueError:  # it cannot do without
                continue
            if without != text:
                continue
            if is_answer:
                raise ValueError(
                    f"data.tokenizer: its chat template does not write {part!r} of the assistant's messages, so that other "
                    "answers would be learnt than those of the conversation; use a template that writes it"
                )
            log.warning("the chat template of data.tokenizer leaves out %r (first in %s)", part, where)


def _alike(one: str, other: str) -> int:
    """The number of first characters that two texts have alike."""
    if other.startswith(one):
        return len(one)
    return next(
        (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
