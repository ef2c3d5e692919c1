"""`python converts_export.py FOLDER`: what llama.cpp's own converter writes into a GGUF file of an exported model, as JSON.

The words of a tokenizer are left out: the converter takes only tokenizers with a hash that it knows, and tests' tokenizers are
unknown."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any


def convert(folder: Path, file: Path) -> dict[str, Any]:
    """The settings of the GGUF file, and its number of tensors."""
    conversion, gguf = import_module("conversion"), import_module("gguf")
    hparams = conversion.ModelBase.load_hparams(folder, False)
    kind = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))
    kind.set_vocab = lambda self: None
    kind(folder, gguf.LlamaFileType.ALL_F32, file, hparams=hparams).write()
    reader = gguf.GGUFReader(file)
    found: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    return found | {"tensors": {each.name: each.data.astype(float).sum() for each in reader.tensors}}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as local:
        print(json.dumps(convert(Path(sys.argv[1]), Path(local) / "model.gguf"), default=str))
