"""Masks of dropout: a function of the seed, the micro-batch, the module and the place alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from dtfm.node.model.dropout import Dropout, MicroBatch, dropped, dropping
from dtfm.node.model.model import computed_again
from tests.cluster.plain import plain_mask

CPU = torch.device("cpu")
SHAPE = torch.Size((2, 129, 515))


def mask(seed: int = 1, number: int = 0, name: str = "layers.0.q_proj", share: float = 0.05) -> torch.Tensor:
    return dropped(MicroBatch(seed, number), name, share, SHAPE, CPU)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 0.99])
def test_the_share_of_zeros_is_as_asked_for_in_the_whole_and_in_each_row_and_column(share: float) -> None:
    found = mask(share=share).double().flatten(0, 1)
    rows, columns = found.shape
    spread = (share * (1 - share)) ** 0.5
    assert abs(found.mean() - share) < 4 * spread / (rows * columns) ** 0.5
    assert (found.mean(1) - share).abs().max() < 5 * spread / columns**0.5
    assert (found.mean(0) - share).abs().max() < 5 * spread / rows**0.5


def test_masks_of_other_micro_batches_modules_seeds_and_places_are_unrelated() -> None:
    base = mask(share=0.5)
    others = {
        "the next micro-batch": mask(number=1, share=0.5),
        "the next step": mask(number=8, share=0.5),
        "another module": mask(name="layers.0.k_proj", share=0.5),
        "the next layer": mask(name="layers.1.q_proj", share=0.5),
        "another seed": mask(seed=2, share=0.5),
        "the next column": base.roll(1, 2),
        "the next row": base.roll(1, 1),
        "the next sample": base.roll(1, 0),
    }
    for (one, a), (two, b) in itertools.combinations({"itself": base, **others}.items(), 2):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1]
        assert abs(correlation) < 5 / base.numel() ** 0.5, (one, two)
    assert torch.equal(base, mask(share=0.5))


def test_they_are_the_bits_of_a_reference_in_numpy() -> None:
    for number, name in ((0, "a"), (2**40, "model.layers.31.mlp.down_proj")):
        found = dropped(MicroBatch(2**64 - 1, number), name, 0.05, SHAPE, CPU)
        assert torch.equal(found, torch.from_numpy(plain_mask(2**64 - 1, number, name, 0.05, tuple(SHAPE))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_has_the_same_bits() -> None:
    found = dropped(MicroBatch(7, 3), "layers.0.q_proj", 0.05, SHAPE, torch.device("cuda"))
    assert torch.equal(found.cpu(), dropped(MicroBatch(7, 3), "layers.0.q_proj", 0.05, SHAPE, CPU))


def test_nothing_is_dropped_outside_of_a_micro_batch() -> None:
    x, module = torch.randn(3, 4, 5), Dropout(0.5, "name")
    assert module(x) is x
    with dropping(MicroBatch(1, 2)):
        y = module(x)
        with dropping(None):
            assert module(x) is x
    assert torch.equal(y, x.masked_fill(dropped(MicroBatch(1, 2), "name", 0.5, x.shape, CPU), 0) * 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.linear = Dropout(0.5, "layer"), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.dropout(x))
        return y


def test_a_layer_that_is_computed_again_drops_the_same_whatever_came_between() -> None:
    layer, x = Layer(), torch.randn(8, 64)
    with dropping(MicroBatch(1, 1)):
        layer(x).sum().backward()
        wanted = layer.linear.weight.grad
        layer.linear.weight.grad = None
        y = computed_again(layer.forward)(x.requires_grad_())
    with dropping(MicroBatch(1, 2)):
        layer(x)
        y.sum().backward()
    assert wanted is not None
    assert layer.linear.weight.grad is not None
    torch.testing.assert_close(layer.linear.weight.grad, wanted, rtol=0, atol=0)


def test_a_compiled_layer_has_each_micro_batchs_own_mask() -> None:
    layer, x = Layer(), torch.randn(8, 64)
    compiled = torch.compile(layer.forward, dynamic=False, backend="eager")
    for number in range(3):
        with dropping(MicroBatch(1, number)):
            torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)
