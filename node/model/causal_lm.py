"""Any transformers causal language model, cut between its decoder layers.

Layer 0 is the embedding, layers 1 to N are the decoder layers, and layer N + 1 is the final norm and the head. A stage runs
the family's own forward on a copy of the model in which only its layers are real. Masks and rotary embeddings, which come
before the decoder layers, have no parameters and are computed by every stage; modules of other stages are bypassed.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dtfm.node.data.samples import Sample
from dtfm.node.data.tokenizer import Tokenizer, check_vocabulary
from dtfm.node.model.bucket import BucketSpec
from dtfm.node.model.causal_config import build, configure, in_one_line
from dtfm.node.model.causal_trace import Anatomy, NotSeparable, dissect, hidden_of
from dtfm.node.model.model import Forward, Model
from dtfm.node.model.pretrained import Pretrained
from dtfm.node.model.weight_files import WeightFiles

log = logging.getLogger(__name__)


class CausalLM(Model):
    def __init__(self, module: PreTrainedModel, sample: Sample, anatomy: Anatomy, files: WeightFiles | None) -> None:
        super().__init__(module, sample, anatomy.layers)
        self._files, self._pretrained = files, Pretrained(files, module) if files is not None else None
        self.weights_digest = files.digest if files is not None else b""
        self._decoder = anatomy.decoder
        self._embedding, self._head = anatomy.layers[0].roots, anatomy.layers[-1].roots
        self._returns_tuple = anatomy.returns_tuple

    def cut(self, module: nn.Module, first: int, past_last: int) -> Forward:
        assert isinstance(module, PreTrainedModel)
        decoder = module.get_submodule(self._decoder)
        assert isinstance(decoder, nn.ModuleList)
        for number, layer in enumerate(decoder, start=1):
            if not first <= number < past_last:
                layer.forward = self._pass_on  # on this instance, since some families read the layer's attributes
        enters, leaves = first > 0, past_last < len(self.layers)
        needed = (() if enters else self._embedding) + (() if leaves else self._head)
        for name in {*self._embedding, *self._head}.difference(needed):
            module.get_submodule(name).forward = self._stand_in
        return _Slice(module, decoder, enters, leaves)

    def initial_parameters(self, bucket: BucketSpec, seed: int) -> dict[str, torch.Tensor]:
        if self._files is None or self._pretrained is None:
            return super().initial_parameters(bucket, seed)
        before = self._files.bytes_read
        values = self._pretrained.read(name for name, _ in bucket.parameters)
        read = self._files.bytes_read - before
        log.info("bucket %d: read %d bytes of %s", bucket.index, read, self._files.name)
        return {name: values[name] for name, _ in bucket.parameters}

    def initialise_module(self, module: nn.Module) -> None:
        assert isinstance(self.module, PreTrainedModel)
        self.module._init_weights(module)  # type: ignore[no-untyped-call]

    def save_config(self, folder: Path, dtype: torch.dtype) -> None:
        assert isinstance(self.module, PreTrainedModel)
        config = copy.deepcopy(self.module.config)
        config.architectures = [type(self.module).__name__]
        config.dtype = dtype
        config.use_cache = True  # off for training; makes generation fast
        config.save_pretrained(folder)

    def _pass_on(self, hidden_states: torch.Tensor, *_args: object, **_keywords: object) -> Any:
        return (hidden_states,) if self._returns_tuple else hidden_states

    def _stand_in(self, *args: object, **keywords: object) -> torch.Tensor:
        """Replaces a module of the embedding or head in stages without it; its value is not used."""
        given = next(x for x in (*args, *keywords.values()) if isinstance(x, torch.Tensor))
        if given.ndim >= 3:  # hidden states
            return given
        return torch.zeros(*given.shape, self.layers[0].output[-1], device=given.device)  # token ids, positions


class _Slice:
    """The forward of a stage: calls the model, and replaces the hidden states before the first decoder layer or takes them after
    the last."""

    def __init__(self, module: PreTrainedModel, decoder: nn.ModuleList, enters: bool, leaves: bool) -> None:
        self._module, self._enters, self._leaves = module, enters, leaves
        self._hidden: torch.Tensor | None = None
        if enters:
            decoder[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        if leaves:
            decoder[-1].register_forward_hook(self._leave)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._hidden = x
        # Not x itself: families may change it in place before the first decoder layer.
        given = {"inputs_embeds": torch.zeros_like(x)} if self._enters else {"input_ids": x}
        if not self._leaves:
            self._hidden = self._module(**given, use_cache=False).logits
        else:
            self._module.base_model(**given, use_cache=False)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden

    def _enter(self, _layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if args:
            return (self._hidden, *args[1:]), keywords
        return args, keywords | {"hidden_states": self._hidden}

    def _leave(self, _layer: nn.Module, _args: object, output: Any) -> None:
        self._hidden = hidden_of(output)


def load_causal_lm(
    family: str, config_json: str, sample: Sample, pretrained: str = "", tokenizer: Tokenizer | None = None
) -> CausalLM:
    """The causal LM of that transformers model_type and config, for samples of token ids (shape [sequence_length]).

    ``pretrained`` names the weights to begin with, which say the family and the config themselves (see WeightFiles), and must fit
    ``tokenizer``.

    Raises:
        ValueError: unknown family, a config that it does not take, or layers that cannot be separated.
    """
    files = WeightFiles(pretrained) if pretrained else None
    config = configure(family, config_json, sample, files.config if files is not None else None)
    family = config.model_type
    if tokenizer is not None and files is not None:
        check_vocabulary(pretrained, config.vocab_size, tokenizer)
    try:
        module = build(config)
        anatomy = dissect(module, sample)
    except NotSeparable as problem:
        raise ValueError(
            f"model.family: {family!r} cannot be cut into layers: {problem}; choose another family"
        ) from None
    except Exception as problem:
        raise ValueError(f"model.config: {family!r} cannot be built from it: {in_one_line(problem)}") from problem
    return CausalLM(module, sample, anatomy, files)
