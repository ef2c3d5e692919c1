"""A small tokenizer on disk, as users have them."""

from __future__ import annotations

from pathlib import Path

from dtfm.node.data import make_tokenizer as product


def make_tokenizer(folder: Path, text: str) -> str:
    """Trains a byte-level BPE tokenizer with 300 tokens, "<end>" being number 0, and saves it. Returns the folder's name."""
    product.make_tokenizer(folder, [text], 300)
    return str(folder)
