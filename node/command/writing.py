"""The work of `dtfm-node generate`: a text that goes on, or a conversation, on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dtfm.node.data.reading.messages import Message
from dtfm.node.host.device import open_device
from dtfm.node.model.generate_text import Writer, prompt_ids, writer_in
from dtfm.protos.printable import printable_lines


@dataclass(frozen=True, slots=True)
class Choices:
    """The options of the command."""

    max_tokens: int
    temperature: float | None
    seed: int | None
    device: str
    weights: str
    untrained: int | None
    json_lines: bool


def write(folder: Path, prompt: str | None, chat: bool, choices: Choices) -> None:
    """Prints text that the model in ``folder`` writes. Raises ValueError."""
    writer = writer_in(folder, open_device(choices.device), choices.weights)
    if choices.untrained is not None:
        writer.forget(choices.untrained)
    if choices.seed is not None:
        torch.manual_seed(choices.seed)
    if not chat:
        assert prompt is not None
        _show("" if choices.json_lines else prompt)
        _write(writer, prompt_ids(writer.tokenizer, prompt), {"prompt": prompt}, choices)
        return
    messages: list[Message] = []
    for text in _messages() if prompt is None else (prompt,):
        messages.append({"role": "user", "content": text})
        answer = _write(writer, writer.answer_ids(messages), {"message": text}, choices)
        messages.append({"role": "assistant", "content": answer})


def _write(writer: Writer, ids: NDArray[np.int64], asked: dict[str, str], choices: Choices) -> str:
    """Prints what the model writes after ``ids``, and returns it."""
    show = (lambda _: None) if choices.json_lines else _show
    written = writer.write(ids, choices.max_tokens, show, choices.temperature)
    if choices.json_lines:
        end = "whole" if written.is_whole else "cut"
        print(json.dumps({**asked, "text": written.text, "tokens": written.tokens, "end": end}), flush=True)
    else:
        print(flush=True)
    return written.text


def _messages() -> Iterator[str]:
    """The lines of the input that are not empty. On a terminal each is asked for."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _show(text: str) -> None:
    print(printable_lines(text.replace("\t", "    ")), end="", flush=True)
