"""Small tokenizers on disk, as users have them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dtfm.node.data import make_tokenizer as product

TURNS = ("<|im_start|>", "<|im_end|>")
"""Special tokens around each message, in the templates of tests."""


def make_tokenizer(folder: Path, text: str) -> str:
    """Trains a byte-level BPE tokenizer with 300 tokens, "<end>" being number 0, and saves it. Returns the folder's name."""
    product.make_tokenizer(folder, [text], 300)
    return str(folder)


def make_metaspace_tokenizer(folder: Path, text: str, scheme: str = "first", **config: Any) -> str:
    """Trains a tokenizer like SentencePiece's: spaces are part of the words after them, and ``scheme`` says where a text gets
    one in front. Its begin is "<s>", its end "</s>"; ``config`` has more settings. Returns the folder's name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *TURNS, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        [text] * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    saved = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    saved.save_pretrained(folder)
    return change_config(folder, **config)


def change_config(folder: Path, **changes: Any) -> str:
    """Sets settings of the folder's tokenizer_config.json. Returns the folder's name."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder)


def add_tokens(folder: Path, tokens: Iterable[str]) -> str:
    """Makes special tokens of ``tokens``. Returns the folder's name."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens]})
    tokenizer.save_pretrained(folder)
    return str(folder)
