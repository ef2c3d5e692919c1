"""`python -m dtfm.node.model.generate_text FOLDER`: generates text with an exported model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from dtfm.node.data.samples import Sample
from dtfm.node.data.tokenizer import Bytes, Tokenizer, load_tokenizer
from dtfm.node.model.causal.anatomy import dissect
from dtfm.node.model.causal.config import build
from dtfm.node.model.causal.language_model import CausalLM


def generate(
    folder: Path, prompt: str, tokens: int, seed: int, temperature: float = 0.8, untrained: int | None = None
) -> str:
    """``prompt`` and up to ``tokens`` more from the model in ``folder``; deterministic for a seed. ``untrained``: with the
    initial weights of a run of this seed.

    Raises:
        ValueError: no model there, or the prompt does not fit.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: give a folder made by `dtfm-coordinator export`")
    # Exports of before have no files of the bytes tokenizer.
    tokenizer: Tokenizer = load_tokenizer(str(folder)) if any(folder.glob("tokenizer*")) else Bytes()
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model = load(folder, trust_remote_code=False, local_files_only=True).eval()
    except Exception as problem:
        raise ValueError(f"{folder} holds no language model that transformers can load: {problem}") from problem
    ids = torch.from_numpy(prompt_ids(tokenizer, prompt))[None]
    room = getattr(model.config, "max_position_embeddings", sys.maxsize) - ids.shape[1]
    if not ids.shape[1] or room < 1:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens; give at least one, and fewer than the model's positions"
        )
    if untrained is not None:
        forget(model, untrained)
    torch.manual_seed(seed)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(tokens, room),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        pad_token_id=0,
    )
    return tokenizer.decode(made[0, len(tokenizer.before) :].numpy())


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> NDArray[np.int64]:
    """The ids of a prompt, which begins as documents do."""
    return np.concatenate([np.asarray(tokenizer.before, dtype=np.int64), tokenizer.encode(prompt).astype(np.int64)])


def forget(model: Any, seed: int) -> None:
    """Gives the model the initial weights of a run of this seed."""
    module, sample = build(model.config), Sample((2,), torch.int64, model.config.vocab_size)
    module.config.use_cache = False
    before = CausalLM(module, sample, dissect(module, sample), None)
    parameters = dict(model.named_parameters())
    for bucket in before.buckets:
        for name, value in before.initial_parameters(bucket, seed).items():
            parameters[name].data.copy_(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dtfm.node.model.generate_text", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder made by `dtfm-coordinator export`")
    parser.add_argument("--prompt", default="def", help="text to continue (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--untrained", type=int, metavar="SEED", help="as a run of this seed begins, before training")
    options = parser.parse_args(arguments)
    try:
        print(generate(options.folder, options.prompt, options.tokens, options.seed, untrained=options.untrained))
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
