"""Attention that stops at the borders of documents: packed ones have the loss that each has alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from dtfm.node.data.samples import Sample, positions_in_documents
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.causal.slice import ISOLATING
from dtfm.node.model.load import load_model
from dtfm.node.model.model import Model
from dtfm.node.model.stage import build_stage
from dtfm.protos import plan_pb2
from dtfm.scheduler.model.memory import Checkpointing, Keeping
from tests.node.model.initialised import initialise_all
from tests.node.model.test_stage import CONFIGS, EXPERTS, MIXTURES, SIZES

CPU = torch.device("cpu")
LENGTH, VOCABULARY, END = 12, 61, 60
BORDERS = ((0, 5, LENGTH), (0, 3, LENGTH))
GROUPED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
NARROW = GROUPED | {"head_dim": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4},
    "olmoe": EXPERTS | {"intermediate_size": 16, "num_experts": 4},
    "phi": SIZES | {"intermediate_size": 48},
    **dict.fromkeys(("gemma", "gemma3_text", "qwen3"), NARROW),
    **dict.fromkeys(("granite", "olmo2", "olmo3", "phi3", "smollm3", "stablelm", "starcoder2"), GROUPED),
}


def config_of(family: str) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY} | (CONFIGS | MIXTURES | OTHERS)[family]


def isolated(family: str) -> Model:
    spec = plan_pb2.Run.Model(family=family, config_json=json.dumps(config_of(family)))
    return load_model(spec, Sample((LENGTH,), torch.int64, VOCABULARY, isolated=True))


def test_a_document_begins_with_the_token_that_ends_the_one_before() -> None:
    ids = torch.tensor([[5, 6, END, 7, 8], [END, END, 5, 6, END], [1, 2, 3, 4, 5]])
    expected = [[0, 1, 0, 1, 2], [0, 0, 1, 2, 0], [0, 1, 2, 3, 4]]
    assert positions_in_documents(ids, END).tolist() == expected


def sample() -> torch.Tensor:
    """Two windows, with borders of documents as in BORDERS."""
    torch.manual_seed(3)
    tokens = torch.randint(1, END, (2, LENGTH + 1))  # 0 is some families' padding, which is not learnt
    for row, cuts in zip(tokens, BORDERS, strict=True):
        row[list(cuts[1:-1])] = END
    return tokens


def transformers_own(family: str) -> Any:
    config = AutoConfig.for_model(family, **config_of(family))
    whole: Any = AutoModelForCausalLM.from_config(config)
    return whole.float().eval()


def alone(whole: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The logits of each document, computed by itself."""
    return [
        whole(input_ids=tokens[row : row + 1, begin:end], use_cache=False).logits[0]
        for row, cuts in enumerate(BORDERS)
        for begin, end in pairwise(cuts)
    ]


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(ISOLATING))
def test_transformers_reads_each_packed_document_by_itself(family: str) -> None:
    tokens, whole = sample(), transformers_own(family)
    inputs = tokens[:, :-1]
    packed = whole(input_ids=inputs, position_ids=positions_in_documents(inputs, END), use_cache=False).logits
    torch.testing.assert_close(torch.cat(alone(whole, tokens)), packed.flatten(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_stages_give_packed_documents_the_loss_that_each_has_alone(family: str) -> None:
    """The second stage gets hidden states; the first computes its layers again."""
    tokens = sample()
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    model = isolated(family)
    middle = len(model.layers) // 2
    again = Keeping(Checkpointing.LAYER)
    stages = [
        build_stage(model, 0, middle, CPU, torch.float32, keeping=again),
        build_stage(model, middle, len(model.layers), CPU, torch.float32),
    ]
    for stage in stages:
        initialise_all(stage, seed=1)
    positions = positions_in_documents(inputs, END)
    received = stages[0].forward(inputs, positions)
    hidden = received.detach().requires_grad_()
    scored = stages[1].loss(hidden, labels, 1.0, positions)
    scored.weighted.backward()  # type: ignore[no-untyped-call]
    received.backward(hidden.grad)  # type: ignore[no-untyped-call]

    whole = transformers_own(family)
    buckets = [bucket for stage in stages for bucket in stage.buckets.values()]
    whole.load_state_dict({n: view for b in buckets for n, view in b.views(b.parameters).items()}, strict=False)
    loss = functional.cross_entropy(torch.cat(alone(whole, tokens)), labels.flatten())
    assert scored.mean.item() == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = sum(float(parameter.grad.norm() ** 2) for parameter in whole.parameters() if parameter.grad is not None)
    assert _squared_norm(buckets) == pytest.approx(norm, rel=1e-4)
    with torch.no_grad():
        assert stages[1].loss(hidden, labels).mean.item() != pytest.approx(loss.item(), rel=1e-5)


def _squared_norm(buckets: Iterable[Bucket]) -> float:
    """Of all gradients; a bucket that two stages share has a part of its own in each."""
    sums: dict[int, torch.Tensor] = {}
    for bucket in buckets:
        sums[bucket.spec.index] = sums.get(bucket.spec.index, torch.zeros(())) + bucket.gradients
    return sum(float(gradients.norm() ** 2) for gradients in sums.values())


@pytest.mark.parametrize("family", ["bloom", "opt"])
def test_families_of_which_it_is_not_known_are_refused_by_name(family: str) -> None:
    sentence = f"data.isolate_documents: of model.family {family!r} it is not known that attention can stop"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        isolated(family)


def test_what_layers_keep_is_measured_with_the_mask_of_documents() -> None:
    from dtfm.node.model.cost.layer_memory import layer_memory

    spec = plan_pb2.Run.Model(family="llama", config_json=json.dumps(config_of("llama")))
    mixed = load_model(spec, Sample((LENGTH,), torch.int64, VOCABULARY))
    apart, together = (layer_memory(model, 2, torch.float32, torch.float32)[1] for model in (isolated("llama"), mixed))
    assert apart.kept > together.kept
    assert apart.working > 0
