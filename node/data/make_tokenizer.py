"""`python -m dtfm.node.data.make_tokenizer FOLDER`: a small tokenizer of words and parts of words, made on the spot."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from dtfm.node.data.reading.sources import standard_library

SIZE = 1024
"""Tokens: the bytes, and 767 words and parts of words. More would make each step of a small model longer."""
EVERY = 8
"""Looks at one in this many of the library's files: enough to know which words are frequent."""


def make_tokenizer(folder: Path, texts: Iterable[str], size: int = SIZE) -> None:
    """Trains a byte-level BPE tokenizer with "<end>" as number 0, and saves it as transformers loads it."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(iter(texts), size, min_frequency=0, show_progress=False, special_tokens=["<end>"])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )


if __name__ == "__main__":
    library = ("".join(pieces) for number, pieces in enumerate(standard_library()) if number % EVERY == 0)
    make_tokenizer(Path(sys.argv[1]), library)
