"""A small tokenizer on disk, as users have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def make_tokenizer(folder: Path, text: str) -> str:
    """Trains a byte-level BPE tokenizer with 300 tokens, "<end>" being number 0, and saves it. Returns the folder's name."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=bpe, eos_token="<end>").save_pretrained(folder)
    return str(folder)
