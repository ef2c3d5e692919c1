"""Text that a trained model writes: a whole model, or an adapter beside its model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, StoppingCriteria, TextStreamer
from transformers.utils import logging as transformers_logging

from dtfm.node.data.allowed import EVERYTHING
from dtfm.node.data.problems import in_one_line
from dtfm.node.data.reaching import give_leave
from dtfm.node.data.reading.messages import Message
from dtfm.node.data.samples import Sample
from dtfm.node.data.text.tokenizer import Pretrained, Tokenizer, load_tokenizer
from dtfm.node.model.causal.adapter_files import AdapterFiles
from dtfm.node.model.causal.anatomy import dissect
from dtfm.node.model.causal.config import build
from dtfm.node.model.causal.language_model import CausalLM
from dtfm.node.model.causal.quantised import OUTLIERS, import_bitsandbytes
from dtfm.protos.published_files import ADAPTER_CONFIG, CONFIG

USUAL_TEMPERATURE = 0.8
"""Of models that name none."""


@dataclass(frozen=True, slots=True)
class Written:
    """``tokens``: the number of tokens of ``text``. ``is_whole``: the model has ended the text itself."""

    text: str
    tokens: int
    is_whole: bool


class Writer:
    """A ``model`` on ``device`` that writes. ``tokenizer`` is its own."""

    def __init__(self, model: Any, tokenizer: Tokenizer, device: torch.device) -> None:
        self._model, self.tokenizer, self._device = model, tokenizer, device
        settings = model.generation_config
        known = settings.to_diff_dict()  # without transformers' own defaults
        self._temperature = float(known.get("temperature", USUAL_TEMPERATURE))
        self._top_k = int(known.get("top_k") or 0)
        ends = settings.eos_token_id
        self._ends: list[int] = [] if ends is None else ends if isinstance(ends, list) else [ends]
        self._padding: int = next((id for id in (settings.pad_token_id, *self._ends) if id is not None), 0)
        self.most = int(getattr(model.config, "max_position_embeddings", sys.maxsize))

    def forget(self, seed: int) -> None:
        """Gives the model the initial weights of a run of this seed."""
        forget(self._model, seed)

    def write(
        self,
        ids: NDArray[np.int64],
        most: int,
        on_text: Callable[[str], None] = lambda _: None,
        temperature: float | None = None,
        goes_on: Callable[[], bool] | None = None,
    ) -> Written:
        """Up to ``most`` tokens after ``ids``. ``on_text`` gets the text piece by piece. ``temperature``: 0 takes the likeliest
        token each time; None: as the model's settings say. ``goes_on``: asked after each token. Raises ValueError if ``ids``
        do not fit the model."""
        room = self.most - len(ids)
        if not len(ids) or room < 1:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; give at least one, and fewer than the model's {self.most} positions"
            )
        warmth = self._temperature if temperature is None else temperature
        how = {"do_sample": True, "temperature": warmth, "top_k": self._top_k} if warmth else {"do_sample": False}
        question = torch.from_numpy(ids)[None].to(self._device)
        pieces: list[str] = []

        def take(piece: str) -> None:
            pieces.append(piece)
            on_text(piece)

        with torch.inference_mode():
            made = self._model.generate(
                input_ids=question,
                attention_mask=torch.ones_like(question),
                max_new_tokens=min(most, room),
                pad_token_id=self._padding,
                streamer=_Streamer(self.tokenizer, take),
                stopping_criteria=[_Until(goes_on)] if goes_on is not None else None,
                **how,
            )
        answer = made[0, len(ids) :].tolist()
        return Written("".join(pieces), len(answer), bool(answer) and answer[-1] in self._ends)

    def answer_ids(self, messages: Sequence[Message]) -> NDArray[np.int64]:
        """The ids of a conversation up to where the model answers. Raises ValueError if the tokenizer has no chat template."""
        assert isinstance(self.tokenizer, Pretrained)
        return self.tokenizer.asked(messages)


class _Until(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Ends a text once ``goes_on`` says no."""

    def __init__(self, goes_on: Callable[[], bool]) -> None:
        self._goes_on = goes_on

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), not self._goes_on(), dtype=torch.bool, device=ids.device)


class _Streamer(TextStreamer):  # type: ignore[misc]  # transformers has no types
    """Hands the text to ``take``, word by word."""

    def __init__(self, tokenizer: Tokenizer, take: Callable[[str], None]) -> None:
        super().__init__(_Shown(tokenizer), skip_prompt=True)  # it calls decode alone
        self._take = take

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._take(text)


@dataclass(frozen=True, slots=True)
class _Shown:
    tokenizer: Tokenizer

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.shown(np.asarray(ids, dtype=np.int64))


def writer_in(folder: Path, device: torch.device, weights: str = "bf16") -> Writer:
    """The writer whose model is in ``folder``, loaded onto ``device``. ``weights``: how the model is kept there, as the run file
    says it of frozen weights. Raises ValueError if the folder has no language model, or its adapter's model cannot be loaded."""
    give_leave(EVERYTHING)  # whoever starts this has named the folder
    transformers_logging.disable_progress_bar()
    if weights != "bf16":
        import_bitsandbytes(f"--weights {weights}")
    try:
        if (folder / ADAPTER_CONFIG).is_file():
            model, base = _beside_an_adapter(folder, device, weights)
        elif (folder / CONFIG).is_file():
            sentence = f"{folder} holds no language model"
            model, base = _whole(str(folder), None, sentence, device, weights), str(folder)
        else:
            raise ValueError(
                f"{folder} has no {CONFIG} and no {ADAPTER_CONFIG}: give a folder made by `dtfm-coordinator export`"
            )
    except torch.OutOfMemoryError:
        fix = "give --weights nf4, or --device cpu" if weights != "nf4" else "give --device cpu"
        raise ValueError(f"the model in {folder} does not fit {device}; {fix}") from None
    tokenizer = load_tokenizer(str(folder) if any(folder.glob("tokenizer*")) else base)
    return Writer(model.eval(), tokenizer, device)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> NDArray[np.int64]:
    """The ids of a prompt, which begins as documents do."""
    return np.concatenate([np.asarray(tokenizer.before, dtype=np.int64), tokenizer.encode(prompt).astype(np.int64)])


def _beside_an_adapter(folder: Path, device: torch.device, weights: str) -> tuple[Any, str]:
    """The model with the adapter in ``folder``, on ``device``, and the model's name."""
    from peft import PeftModel  # it takes seconds to import

    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base, revision = str(settings["base_model_name_or_path"]), settings.get("revision")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{folder / ADAPTER_CONFIG} cannot be read: {problem!r}") from None
    if not (folder / AdapterFiles.WHOLE).is_file():
        raise ValueError(f"{folder} has no {AdapterFiles.WHOLE}; copy it again: peft would load a pickle in its place")
    fix = "copy it to where this names it, or `dtfm-coordinator export --merged` the whole model"
    sentence = f"the adapter in {folder} stands beside {base!r}, which cannot be loaded; {fix}"
    model = _whole(base, revision, sentence, device, weights)
    try:
        return PeftModel.from_pretrained(model, str(folder)), base
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # whatever peft raises
        raise ValueError(f"the adapter in {folder} does not fit {base!r}: {in_one_line(problem)}") from problem


def _whole(name: str, revision: str | None, sentence: str, device: torch.device, weights: str) -> Any:
    """The language model called ``name``, on ``device``. Raises ValueError with the ``sentence`` and the cause."""
    revision = revision or "main"
    # A published folder may contain code and pickles; neither is loaded.
    how: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True, "dtype": "auto", "revision": revision}
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        if weights == "bf16":
            return load(name, **how).to(device)
        # Otherwise the whole model would have to fit before it is packed.
        how["device_map"] = {"": device}
        return load(name, quantization_config=_packing(weights, name, revision), **how)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # whatever transformers raises
        raise ValueError(f"{sentence} ({in_one_line(problem)})") from problem


def _packing(weights: str, name: str, revision: str) -> BitsAndBytesConfig:
    """Packs the matrices of the model's layers as runs do, and computes in the dtype of its files."""
    if weights == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIERS)
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=config.dtype or torch.float32,
    )


def forget(model: Any, seed: int) -> None:
    """Gives the model the initial weights of a run of this seed."""
    module, sample = build(model.config), Sample((2,), torch.int64, model.config.vocab_size)
    module.config.use_cache = False
    before = CausalLM(module, sample, dissect(module, sample), None)
    parameters = dict(model.named_parameters())
    for bucket in before.buckets:
        for name, value in before.initial_parameters(bucket, seed).items():
            parameters[name].data.copy_(value)
