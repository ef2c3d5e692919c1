"""A record of a source as a conversation: messages as chat templates take them, whatever form the record has.

There are two forms. OpenAI's has "messages" with "role" and "content", and "tools" beside them. ShareGPT's has "conversations"
with "from" and "value", and "system" and "tools" beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtfm.protos.run_file.records import MESSAGES

SHAREGPT = "conversations"

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""The role that each "from" of ShareGPT means. The value of a "function_call" is a call, or a list of calls, in JSON."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """``messages``: each has a "role", and all that the record says of it. Its "content" is text, or missing. ``tools``: what
    the assistant could call, or None. ``where``: the file and the line, for errors."""

    messages: list[Message]
    tools: list[Any] | None
    where: str


def conversation_of(record: Any, where: str) -> Conversation:
    """Raises ValueError if the record is no conversation, or has no message of the assistant."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {type(record).__name__}, not an object")
    field = next((key for key in (MESSAGES, SHAREGPT) if isinstance(record.get(key), list) and record[key]), None)
    if field is None:
        raise ValueError(
            f"{where} has no list called {MESSAGES!r} or {SHAREGPT!r}; set data.text_field to the field that holds the text"
        )
    messages = [
        _message(message, f"{where}, message {number}") for number, message in enumerate(record[field], start=1)
    ]
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f'{where} has no message of the role "assistant", so that there is nothing to learn; leave it out'
        )
    return Conversation(messages, _tools(record.get("tools"), where), where)


def _message(given: Any, where: str) -> Message:
    if isinstance(given, dict) and "role" not in given and "from" in given:
        given = _from_sharegpt(given, where)
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str) or not role:
        raise ValueError(f'{where}: a message must have a "role", or a "from", and a "content", or a "value"')
    message = {key: value for key, value in given.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_text_parts(content, where))
    elif content is None:
        if role != "assistant" or not any(value for key, value in message.items() if key not in ("role", "name")):
            raise ValueError(
                f"{where} ({role!r}) has no content; only the assistant's may have none, and must then have something else, "
                'such as "tool_calls". Give it a content, or leave the line out'
            )
    elif not isinstance(content, str):
        raise ValueError(f"{where}: its content is {type(content).__name__}; give text, or a list of parts of text")
    return message


def _text_parts(parts: list[Any], where: str) -> Iterator[str]:
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(text, str):
            raise ValueError(
                f"{where} has a part of the type {kind!r:.40}, which a model of text cannot read; leave the line out, or "
                'give parts of the form {"type": "text", "text": "..."} alone'
            )
        yield text


def _from_sharegpt(given: Mapping[str, Any], where: str) -> Message:
    sender, value = given["from"], given.get("value")
    if sender not in _ROLES:
        raise ValueError(f'{where} is from {sender!r:.40}; "from" must be one of {", ".join(_ROLES)}')
    others = {key: each for key, each in given.items() if key not in ("from", "value")}
    if sender != "function_call":
        return {"role": _ROLES[sender], "content": value, **others}
    called = _parsed(value)
    calls = called if isinstance(called, list) else [called]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(
            f'{where} is from "function_call", but its value is not JSON with a "name" and "arguments"; mend it, or leave the '
            "line out"
        )
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls], **others}


def _tools(given: Any, where: str) -> list[Any] | None:
    """The tools of a record, which some write as JSON in a string."""
    if given is None or given in ("", []):
        return None
    tools = _parsed(given)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f'{where}: "tools" must be a list of objects, each the JSON schema of a tool; mend it')
    return tools or None


def _parsed(value: Any) -> Any:
    """The value of JSON in a string, or None if it is not JSON. Whatever is no string stays."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return None
