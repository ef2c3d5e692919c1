"""`python reads_export.py FOLDER`: what the transformers that Python finds makes of an exported model, as JSON.

Its standard input has a text and token ids; see `Read`. It uses nothing of dtfm."""

from __future__ import annotations

import json
import sys
from typing import Any, TypedDict


class Read(TypedDict):
    """``ids`` are the tokens of the text, and ``text`` is their decoded form. ``logits`` are those after the last token id,
    ``theta`` and ``scaling`` the rotary settings as this transformers has them."""

    version: str
    tokenizer: str
    ids: list[int]
    text: str
    logits: list[float]
    theta: Any
    scaling: Any
    eos: Any
    bos: Any
    pad: Any
    stops: Any
    sampling: Any
    dtype: str
    missing: list[str]


def read(folder: str, text: str, tokens: list[int]) -> Read:
    import torch
    import transformers

    model: Any
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(folder, output_loading_info=True, torch_dtype="auto", attn_implementation="eager")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokens])).logits[0, -1].float()
    config, how = model.config, model.generation_config
    rotary = getattr(config, "rope_parameters", None) or {}
    return Read(
        version=transformers.__version__,
        tokenizer=type(tokenizer).__name__,
        ids=ids,
        text=tokenizer.decode(ids),
        logits=logits.tolist(),
        theta=getattr(config, "rope_theta", rotary.get("rope_theta")),
        scaling=getattr(config, "rope_scaling", None),
        eos=config.eos_token_id,
        bos=config.bos_token_id,
        pad=config.pad_token_id,
        stops=how.eos_token_id,
        sampling=how.top_p,
        dtype=str(model.dtype),
        missing=sorted([*info["missing_keys"], *info["unexpected_keys"]]),
    )


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(read(sys.argv[1], asked["text"], asked["tokens"])))
