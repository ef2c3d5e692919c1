"""The loss is that of all logits at once, whatever the chunks that they are made in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtfm.node.model import loss as loss_module
from dtfm.node.model.loss import Scored, chunk_tokens, loss_of_part
from dtfm.node.model.model import Part
from dtfm.node.model.stage import build_stage
from tests.node.allocated import most_allocated
from tests.node.model.initialised import initialise_all
from tests.node.model.test_stage import CONFIGS, CPU, VOCABULARY, batch_of, model_of


def score(logits: torch.Tensor, labels: torch.Tensor) -> Scored:
    """Of a part without a head."""
    return loss_of_part(Part(lambda x: x), logits, labels, logits.shape[-1], ())


def test_it_is_the_mean_cross_entropy() -> None:
    logits = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    scored = score(logits, torch.zeros(2, 3, dtype=torch.int64))
    assert scored.mean.item() == pytest.approx(torch.log(torch.tensor(8.0)).item())
    assert scored.mean.dtype == torch.float32
    classes = torch.tensor([[0.0, 100.0], [100.0, 0.0]], dtype=torch.float64)
    assert score(classes, torch.tensor([1, 1])).mean.item() == pytest.approx(50.0)
    assert score(classes, torch.tensor([1, 1])).mean.dtype == torch.float64


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 tokens, of which the last has fewer."""
    monkeypatch.setattr(loss_module, "LEAST_TOKENS", 1)
    monkeypatch.setattr(loss_module, "MOST_LOGITS_BYTES", 4 * VOCABULARY * 7)


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_change_neither_loss_nor_gradients(name: str, request: pytest.FixtureRequest) -> None:
    model = model_of(name)
    stage = build_stage(model, 0, len(model.layers), CPU, torch.float64)
    initialise_all(stage, 5)
    inputs, labels = batch_of(name)
    results = []
    for chunks in (False, True):
        if chunks:
            request.getfixturevalue("small_chunks")
        assert (chunk_tokens(labels.numel(), VOCABULARY) < labels.numel()) == chunks
        stage.zero_gradients()
        scored = stage.loss(inputs, labels, 0.25)
        torch.autograd.backward(scored.weighted)
        with torch.no_grad():
            assert stage.loss(inputs, labels).mean.item() == pytest.approx(scored.mean.item(), rel=1e-14)
        results.append((scored.mean.item(), [bucket.gradients.clone() for bucket in stage.buckets.values()]))
    (mean, gradients), (chunked_mean, chunked_gradients) = results
    assert chunked_mean == pytest.approx(mean, rel=1e-13)
    for whole, chunked in zip(gradients, chunked_gradients, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-11, atol=1e-15)


@pytest.mark.usefixtures("small_chunks")
def test_the_gradients_of_the_head_are_final_in_the_backward_pass() -> None:
    model = model_of("llama")
    stage = build_stage(model, len(model.layers) - 1, len(model.layers), CPU, torch.float64)
    initialise_all(stage, 5)
    hidden = torch.randn(3, 12, 32, dtype=torch.float64, requires_grad=True)
    scored = stage.loss(hidden, batch_of("llama")[1])
    called: list[torch.Tensor] = []
    for parameters in stage.parameters.values():
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(called.append)  # type: ignore[no-untyped-call]
    torch.autograd.backward(scored.weighted)
    assert len(called) == len({id(parameter) for parameter in called}) == 2


def test_memory_holds_the_logits_of_a_chunk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "MOST_LOGITS_BYTES", 1 << 20)
    tokens, hidden, classes = 4096, 8, 1000
    head = nn.Linear(hidden, classes, bias=False)
    part, x = Part(lambda x: x, head), torch.randn(1, tokens, hidden, requires_grad=True)
    labels = torch.zeros(1, tokens, dtype=torch.int64)

    def work() -> None:
        torch.autograd.backward(loss_of_part(part, x, labels, classes, list(head.parameters())).weighted)

    of_logits = 4 * tokens * classes
    assert most_allocated(work) < 0.5 * of_logits
