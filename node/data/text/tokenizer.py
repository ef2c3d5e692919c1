"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtfm.node.data.problems import in_one_line
from dtfm.node.data.reaching import hub_cache, hub_token, needs_leave
from dtfm.node.data.reading.messages import Conversation, Message
from dtfm.node.data.text.rendered import ChatTemplate, Rendered, Span
from dtfm.node.data.text.tokenizer_files import (
    ONLY_IF_THERE,
    as_its_files_say,
    byte_vocabulary,
    save_bytes,
    save_tokenizer,
)

Marked = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""The ids of a text, and of each whether a model learns to write it."""


class Bytes:
    """UTF-8: every byte is a token. A newline separates documents."""

    name = "bytes"
    size = 256
    separator = (10,)
    before = after = ()
    end: int | None = None
    identity = b"bytes"

    @property
    def special_ids(self) -> dict[str, int]:
        return {}

    def encode(self, text: str) -> NDArray[np.uint8]:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.uint8]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def shown(self, ids: NDArray[np.integer[Any]]) -> str:
        return self.decode(ids)

    def render(self, conversation: Conversation) -> list[Rendered]:
        raise ValueError('data.tokenizer: "bytes" has no chat template; name a tokenizer that has one')

    def encode_rendered(self, texts: Sequence[Rendered]) -> list[Marked]:
        raise NotImplementedError  # nobody has rendered them

    def encode_further(self, texts: Sequence[str]) -> list[NDArray[np.uint8]]:
        return self.encode_all(texts)

    def save(self, folder: Path) -> None:
        save_bytes(folder)

    def vocabulary(self) -> dict[str, int]:
        return byte_vocabulary()


class Pretrained:
    """A tokenizer of transformers. Its end-of-text token separates documents, or a newline if it has none."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.name = name
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self.size = len(tokenizer)
        self.end: int | None = tokenizer.eos_token_id
        self.separator: tuple[int, ...] = (self.end,) if self.end is not None else tuple(self.encode("\n").tolist())
        self.before, self.after = self._around()
        together = self.encode("\na").tolist()
        self._differs_at_the_front = together != [*self.encode("\n").tolist(), *self.encode("a").tolist()]

    @property
    def identity(self) -> bytes:
        inner = getattr(self._tokenizer, "backend_tokenizer", None)
        if inner is None:
            return b""
        packages = [version(package) for package in ("tokenizers", "transformers")]
        return f"{packages}\n{inner.to_str()}\n{self._tokenizer.chat_template}\n{self.before}{self.after}".encode()

    @property
    def special_ids(self) -> dict[str, int]:
        found = {f"{name}_token_id": getattr(self._tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        return {key: int(number) for key, number in found.items() if number is not None}

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.asarray(ids, dtype=np.int64) for ids in self._made(texts)["input_ids"]]

    def _made(self, texts: Sequence[str], **more: bool) -> Any:
        if not texts:  # transformers does not take none
            return {"input_ids": [], "offset_mapping": []}
        # JSON may have half surrogates. Each becomes one character, so that places in the text stay.
        whole = [text.encode("utf-8", errors="replace").decode("utf-8") for text in texts]
        return self._tokenizer(whole, add_special_tokens=False, return_attention_mask=False, verbose=False, **more)

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the tokenizer itself puts before and after a text."""
        inner, whole = self.encode("a").tolist(), list(self._tokenizer("a")["input_ids"])
        for begin in range(len(whole) - len(inner) + 1):
            if whole[begin : begin + len(inner)] == inner:
                return tuple(whole[:begin]), tuple(whole[begin + len(inner) :])
        return (), ()

    def encode_further(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        if not (self._differs_at_the_front and self._tokenizer.is_fast):
            return self.encode_all(texts)
        made = self._made([f"\n{text}" for text in texts], return_offsets_mapping=True)
        found = []
        for text, ids, places in zip(texts, made["input_ids"], made["offset_mapping"], strict=True):
            its_own = [id for id, (begin, _) in zip(ids, places, strict=True) if begin > 0]
            one_of_both = any(begin == 0 and end > 1 for begin, end in places)
            found.append(self.encode(text) if one_of_both else np.asarray(its_own, dtype=np.int64))
        return found

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode(ids.tolist()))

    def shown(self, ids: NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def asked(self, messages: Sequence[Message]) -> NDArray[np.int64]:
        """The ids of a conversation up to where an answer begins. Raises ValueError."""
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {self.name} has no chat template, so that it knows no conversations; give a text "
                "to continue"
            )
        return self.encode(self._template.asked(messages))

    def render(self, conversation: Conversation) -> list[Rendered]:
        if not self._tokenizer.is_fast:
            raise ValueError(
                "data.tokenizer: it has no tokenizer.json, so that nobody knows which characters its tokens stand for, and which "
                "belong to an answer; name a tokenizer that has one"
            )
        return self._template.render(conversation)

    def encode_rendered(self, texts: Sequence[Rendered]) -> list[Marked]:
        made = self._made([each.text for each in texts], return_offsets_mapping=True)
        ids = (np.asarray(each, dtype=np.int64) for each in made["input_ids"])
        places = (np.asarray(each, dtype=np.int64).reshape(-1, 2) for each in made["offset_mapping"])
        return [(i, _inside(p, text.learnt)) for i, p, text in zip(ids, places, texts, strict=True)]

    def save(self, folder: Path) -> None:
        save_tokenizer(self._tokenizer, folder)

    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())


Tokenizer = Bytes | Pretrained
"""A tokenizer's members:

- ``name``: what a run calls it. ``size``: ids are in [0, ``size``).
- ``separator``: the ids that end a text and stand between two. ``end``: that id if it is a single end-of-text token, else None.
- ``before``, ``after``: the ids that the tokenizer itself puts around each text.
- ``identity``: equal for two tokenizers that make the same ids from the same text. Empty if unknown.
- ``special_ids``: the ids of its tokens for begin, end and padding, by their names in config.json.
- ``encode``: the text's ids, 1-D, without special tokens. ``encode_all``: the ids of several texts, with all cores.
  ``encode_further``: the same of texts that continue another one after the end of a line.
- ``shown``: the text of ids, without special tokens.
- ``render``: a conversation as the model is to read it (see ChatTemplate.render). ``encode_rendered``: the ids of rendered
  texts, as `encode` makes them of each whole text. Ids that have a character of the learnt parts are learnt.
- ``save``: writes the files that transformers' AutoTokenizer loads into a local folder.
- ``vocabulary``: the id of each token.
"""


def between_documents(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that stand between two documents, beside those that the tokenizer puts around each itself."""
    ends_itself = tokenizer.end is not None and tokenizer.end in (*tokenizer.after[-1:], *tokenizer.before[:1])
    return () if ends_itself else tokenizer.separator


def border(tokenizer: Tokenizer) -> int | None:
    """The id at which a document begins: its own first, or the end of the document before. None if no such id is known."""
    return tokenizer.before[0] if tokenizer.before else tokenizer.end


def _inside(places: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens have a character of the spans, or stand between two that have. ``places`` [tokens, 2]: the characters
    [begin, end) of each."""
    found = np.zeros(len(places), dtype=np.bool_)
    for begin, end in spans:
        inside = np.flatnonzero((places[:, 0] < end) & (places[:, 1] > begin))
        if len(inside):
            found[inside[0] : inside[-1] + 1] = True
    return found


MOST_PADDING = 1024
"""Models often have a few more ids than their tokenizer, so that a matrix gets a size that GPUs like."""


def check_vocabulary(pretrained: str, model_size: int, tokenizer: Tokenizer) -> None:
    """Raises ValueError unless ``tokenizer`` is the tokenizer of the pretrained model: a folder, or a name on the hub, with
    ``model_size`` ids. If the folder has no tokenizer, only the sizes can tell."""
    folder = Path(pretrained).expanduser()
    fix = f"set data.tokenizer = {pretrained!r}, or leave it out"
    if "://" not in pretrained and (not folder.is_dir() or any(folder.glob("tokenizer*"))):
        theirs = load_tokenizer(pretrained)
        if tokenizer.vocabulary() != theirs.vocabulary():
            raise ValueError(
                f"data.tokenizer: its vocabulary ({tokenizer.size} tokens) is not that of model.pretrained {pretrained!r} "
                f"({theirs.size} tokens); {fix}"
            )
    elif not 0 <= model_size - tokenizer.size < MOST_PADDING:
        raise ValueError(
            f"data.tokenizer: it has {tokenizer.size} tokens, but model.pretrained {pretrained!r} was trained with {model_size}, "
            "and has no tokenizer; set data.tokenizer to the one that it was trained with"
        )


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called ``name``: "bytes", a local folder, or a name on the Hugging Face hub.

    Raises:
        ValueError: it cannot be loaded.
    """
    if name == "bytes":
        return Bytes()
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    local = Path(name).expanduser()
    here, token = local.is_dir(), hub_token(name)
    try:
        load: Any = AutoTokenizer.from_pretrained
        cache, where = None if here else hub_cache(name), str(local) if here else name
        tokenizer = load(where, trust_remote_code=False, token=token, cache_dir=cache)
        as_its_files_say(tokenizer, where, partial(cached_file, where, token=token, cache_dir=cache, **ONLY_IF_THERE))
        return Pretrained(tokenizer, name)
    except Exception as problem:
        why = f"{in_one_line(problem)}){'' if here or '://' in name else needs_leave(name)}"
        raise ValueError(
            f'data.tokenizer: {name!r} cannot be loaded ({why}; give "bytes", a folder with a tokenizer\'s files, or the '
            "name of one on the Hugging Face hub"
        ) from problem
