"""The computation of some layers of a causal language model, by the family's own forward.

A stage has a copy of the whole model; only its own layers are real. Modules before the decoder layers without parameters
(masks, rotary embeddings) are computed by every stage. Modules of other stages are bypassed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel, masking_utils

from dtfm.node.data.samples import Sample
from dtfm.node.model.causal.anatomy import Anatomy, hidden_of
from dtfm.node.model.compiled_layer import compiled
from dtfm.node.model.model import computed_again, fake_parameters, weakly


class Slice:
    """Layers [first, past_last) of ``module``. Changes the module's modules.

    ``body`` and ``head``: see `Part`. ``checkpointed``: the decoder layers keep their inputs alone. An embedding keeps little,
    and the head's backward pass follows its forward pass directly. ``compiles``: the same layers are compiled.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        anatomy: Anatomy,
        first: int,
        past_last: int,
        checkpointed: bool = False,
        compiles: bool = False,
    ) -> None:
        self._module, self._anatomy = module, anatomy
        self._first, self._past_last = first, past_last
        self._hidden: torch.Tensor | None = None  # what the first decoder layer gets, then what the last one returns
        self._decoded: Any = None  # what the decoder returned last, without its hidden states
        self._chunk: torch.Tensor | None = None  # what the decoder is to return instead of decoding
        chain = module.get_submodule(anatomy.decoder)
        assert isinstance(chain, nn.ModuleList)
        # Replaced on the instances, since some families read the modules' attributes.
        for number, layer in enumerate(chain, start=1):
            forward = weakly(compiled(layer.forward) if compiles else layer.forward)
            layer.forward = partial(weakly(self._layer), number, computed_again(forward) if checkpointed else forward)
        for name in {*anatomy.layers[0].roots, *anatomy.layers[-1].roots}:
            part = module.get_submodule(name)
            part.forward = partial(weakly(self._outside), name, weakly(part.forward))
        around = module.get_submodule(anatomy.decoder.rpartition(".")[0])
        around.forward = partial(weakly(self._decode), weakly(around.forward))
        chain[0].register_forward_pre_hook(weakly(self._enter), with_kwargs=True)
        chain[-1].register_forward_hook(weakly(self._leave))

    @property
    def _enters(self) -> bool:
        """Whether hidden states come in, rather than token ids."""
        return self._first > 0

    @property
    def _leaves(self) -> bool:
        """Whether hidden states go out to a further stage."""
        return self._past_last < len(self._anatomy.layers)

    def move(self, first: int, past_last: int) -> None:
        """Makes this object the slice of these layers."""
        self._first, self._past_last = first, past_last

    def body(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids [b, s] or hidden states to the hidden states after the slice's last layer. In a slice with the model's
        head, these are the head's input if the head is separate; otherwise the result is logits. With ``positions`` [b, s],
        attention stops where positions start over."""
        self._hidden = x
        # Not x itself: families may change it in place before the first decoder layer.
        given = {"inputs_embeds": torch.zeros_like(x)} if self._enters else {"input_ids": x}
        if positions is not None:
            given["position_ids"] = positions
        with documents_not_looked_for() if positions is None else nullcontext():
            if self._leaves or self._anatomy.separate_head:
                self._module.base_model(**given, use_cache=False)
            else:
                self._hidden = self._module(**given, use_cache=False).logits
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, hidden] to logits [tokens, vocabulary]: the whole computation after the decoder."""
        self._chunk = hidden[None]
        try:
            ids = torch.zeros(self._chunk.shape[:2], dtype=torch.int64, device=hidden.device)
            with documents_not_looked_for():
                logits: torch.Tensor = self._module(input_ids=ids, use_cache=False).logits
            return logits[0]
        finally:
            self._chunk = None

    def _layer(self, number: int, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if self._first <= number < self._past_last:
            return forward(*args, **keywords)
        hidden = args[0] if args else keywords["hidden_states"]
        return (hidden,) if self._anatomy.returns_tuple else hidden

    def _outside(self, name: str, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """A module of the embedding or the head. In a slice without it, the value that it returns is not used."""
        layers = self._anatomy.layers
        if (not self._enters and name in layers[0].roots) or (not self._leaves and name in layers[-1].roots):
            return forward(*args, **keywords)
        given = next(x for x in (*args, *keywords.values()) if isinstance(x, torch.Tensor))
        if given.ndim >= 3:  # hidden states
            return given
        return torch.zeros(*given.shape, layers[0].output[-1], device=given.device)  # token ids, positions

    def _decode(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """The module that calls the decoder layers."""
        if self._chunk is not None:
            return _with_hidden(self._decoded, self._chunk)
        decoded = forward(*args, **keywords)
        if not self._leaves and self._anatomy.separate_head:
            self._hidden = decoded[0]
            self._decoded = _with_hidden(decoded, self._hidden.new_empty(0))
        return decoded

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The input of the first decoder layer: the hidden states that came in, or the embedding's output in the layers' own
        dtype, which packed parameters do not have. That is the dtype at a cut there. A family that adds a buffer to the
        embedding, its table of positions, would have made the output float32."""
        if self._enters:
            hidden = self._hidden
        elif self._past_last > 1:
            wide = next(parameter.dtype for parameter in layer.parameters() if parameter.is_floating_point())
            hidden = (args[0] if args else keywords["hidden_states"]).to(wide)
        else:
            return None
        if args:
            return (hidden, *args[1:]), keywords
        return args, keywords | {"hidden_states": hidden}

    def _leave(self, _layer: nn.Module, _args: object, output: Any) -> None:
        if self._leaves:
            self._hidden = hidden_of(output)


def _with_hidden(decoded: Any, hidden: torch.Tensor) -> Any:
    """What a decoder returned, with other hidden states."""
    if isinstance(decoded, tuple):
        return (hidden, *decoded[1:])
    other = copy.copy(decoded)
    other["last_hidden_state"] = hidden
    return other


ISOLATING = frozenset(
    (
        *(
            "gemma",
            "gemma2",
            "gemma3_text",
            "gpt2",
            "gpt_neo",
            "gpt_neox",
            "gptj",
            "granite",
            "llama",
            "mistral",
            "mixtral",
        ),
        *("olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
    )
)
"""The families whose attention stops where positions start over: transformers makes their masks that way. In others attention
may not stop, and transformers does not say so (opt, bloom, falcon, mpt and gpt_oss mix documents)."""


@contextmanager
def documents_not_looked_for(isolated: bool = False) -> Iterator[None]:
    """Inside the block, in this thread, transformers takes each sample for one sequence.

    Otherwise transformers reads the positions' values to find out. A GPU would be waited for at each forward pass. Fake tensors
    have no values: for them transformers would make a mask of tokens by tokens. Training has such a mask only if samples are
    ``isolated``.
    """
    before = _answers.__dict__.get("borders")
    _answers.borders = before or (torch.zeros_like if isolated else lambda _ids: None)
    try:
        yield
    finally:
        _answers.borders = before


def _find_packed_sequence_indices(ids: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
    answer = _answers.__dict__.get("borders")
    return _looked_for(ids, *arguments, **keywords) if answer is None else answer(ids)


_answers = threading.local()
_looked_for = masking_utils.find_packed_sequence_indices
masking_utils.find_packed_sequence_indices = _find_packed_sequence_indices


def has_separate_head(module: PreTrainedModel, anatomy: Anatomy, sample: Sample) -> bool:
    """Whether the model's logits can be made from its decoder's output alone, some tokens at a time."""
    count, whole = len(anatomy.layers), copy.deepcopy(module)
    hidden, vocabulary = anatomy.layers[0].output[-1], anatomy.layers[-1].output[-1]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake_parameters(whole, torch.float32)
        try:
            last = Slice(whole, replace(anatomy, separate_head=True), count - 1, count)
            logits = last.head(last.body(torch.zeros(1, *sample.shape, hidden))[0, : sample.shape[0] // 2])
            return logits.shape == (sample.shape[0] // 2, vocabulary)
        except Exception:  # a forward that wants more than that
            return False
