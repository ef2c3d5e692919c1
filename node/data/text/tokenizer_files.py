"""A tokenizer's files, as AutoTokenizer of transformers 5 and of older releases loads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

CONFIG = "tokenizer_config.json"
FAST = "PreTrainedTokenizerFast"
"""Every release of transformers has this name for a tokenizer that tokenizer.json describes in full."""
_RENAMED = "TokenizersBackend"
"""The name that transformers 5 has for it."""
_PRIVATE = ("is_local", "local_files_only", "name_or_path")
"""Settings that show where this node got the tokenizer."""
_REBUILT = frozenset({"CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "GPTNeoXTokenizer", "LlamaTokenizer"})
"""With these classes, transformers 4 decides itself how a text begins and ends, unless the config says it."""
WHOLE = "tokenizer.json"
ONLY_IF_THERE: dict[str, Any] = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}
"""With these, transformers' cached_file returns None for a file that is not there."""
_TRIED = (
    "In 2024, 12345 of 67890.",
    "caf\u00e9 cafe\u0301 Gr\u00f6\u00dfe \ufb01",
    "  two  spaces\n\n\tand a tab\r\n",
    "don't WE'LL (x+1)!?",
    "\u4f60\u597d \u3053\u3093\u306b\u3061\u306f \u041f\u0440\u0438\u0432\u0435\u0442 \U0001f389",
)
"""Texts of which tokenizers are known to make different tokens: numbers, accents, spaces, contractions, other scripts."""


def as_its_files_say(tokenizer: Any, name: str, file: Callable[[str], str | None]) -> None:
    """Makes a tokenizer of transformers, called ``name``, begin and end texts as its tokenizer_config.json says, which
    transformers 5 does not read beside a tokenizer.json. Warns if the tokenizer makes other tokens than its tokenizer.json, as
    some classes build a tokenizer of their own. ``file``: from a file's name to its path, or None."""
    whole = file(WHOLE)
    if whole is None:
        return
    config = file(CONFIG)
    said = json.loads(Path(config).read_text(encoding="utf-8")) if config is not None else {}
    for key, has_it, id in zip(
        ("add_bos_token", "add_eos_token"),
        _ends(tokenizer),
        (tokenizer.bos_token_id, tokenizer.eos_token_id),
        strict=True,
    ):
        if said.get(key) is True and not has_it and id is not None and hasattr(tokenizer, key):
            setattr(tokenizer, key, True)
    if "__init__" in type(tokenizer).__dict__:
        _warn_of_other_tokens(tokenizer, name, whole)


def _warn_of_other_tokens(tokenizer: Any, name: str, whole: str) -> None:
    from tokenizers import Tokenizer

    described, kind = Tokenizer.from_file(whole), type(tokenizer).__name__
    for text in _TRIED:
        theirs = described.encode(text, add_special_tokens=False)
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        if theirs.ids != list(ours):
            log.warning(
                "data.tokenizer: %s: the class %s makes other tokens of %r than its %s does: %s instead of %s. The run trains on "
                "the former, as transformers 5 does; if the weights were trained on the latter, set "
                '"tokenizer_class" to "%s" in its %s',
                name,
                kind,
                text,
                WHOLE,
                tokenizer.convert_ids_to_tokens(ours),
                theirs.tokens,
                FAST,
                CONFIG,
            )
            return


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes the files of a tokenizer of transformers into a local folder."""
    tokenizer.save_pretrained(folder)
    file = folder / CONFIG
    if file.is_file():
        config = with_older_names(json.loads(file.read_text(encoding="utf-8")), *_ends(tokenizer))
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def with_older_names(config: dict[str, Any], adds_bos: bool, adds_eos: bool) -> dict[str, Any]:
    """The content of a tokenizer_config.json of transformers 5, in a form that older releases can read too. ``adds_bos``,
    ``adds_eos``: whether the tokenizer puts such a token before and after a text."""
    found = {key: value for key, value in config.items() if key not in _PRIVATE}
    kind = str(found.get("tokenizer_class", "")).removesuffix("Fast")
    if kind == _RENAMED:
        found["tokenizer_class"] = FAST
    if kind in _REBUILT:
        found |= {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    if isinstance(extra := found.get("extra_special_tokens"), list):  # older releases read a table here
        del found["extra_special_tokens"]
        found["additional_special_tokens"] = extra
    return found


def save_bytes(folder: Path) -> None:
    """Writes the files of a tokenizer that makes a token of each byte of the UTF-8. The token's id is the byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": FAST, "clean_up_tokenization_spaces": False}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def byte_vocabulary() -> dict[str, int]:
    """The byte that each character stands for in byte-level tokenizers: printable ones of Latin-1 for themselves, the others, in
    order, by the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _ends(tokenizer: Any) -> tuple[bool, bool]:
    """Whether the tokenizer puts a token before, and one after, each text."""
    ids = tokenizer("a")["input_ids"]
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    return bool(ids) and begin is not None and ids[0] == begin, bool(ids) and end is not None and ids[-1] == end
