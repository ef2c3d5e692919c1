"""What comes from neighbouring stages is compared with what came before."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dtfm.node.training.usual import KNOWN_AFTER, MOST_DEVIATIONS, Unusual
from dtfm.node.training.watch import Watch, measured, some
from dtfm.protos.frame import Kind

WIDTH = 32
Change = Callable[[torch.Tensor], torch.Tensor]


class Stream:
    """Activations, or gradients, as they come: those of a layer share a direction."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        self.common = torch.randn(WIDTH, generator=self.chance)
        self.size = 1.0

    def tensor(self, kind: Kind) -> torch.Tensor:
        made = torch.randn(2, 16, WIDTH, generator=self.chance)
        return self.size * (made + self.common if kind is Kind.ACTIVATION else 1e-4 * made)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def step(
    watch: Watch, stream: Stream, kind: Kind, change: Change = same, senders: str = "a", each: int = 3
) -> list[Unusual]:
    """A step in which each sender sends so many tensors; a changes its. It is committed."""
    watch.begin()
    for number in range(each * len(senders)):
        source = senders[number % len(senders)]
        watch.took(kind, source, number, (change if source == "a" else same)(stream.tensor(kind)))
    found = watch.unusual()
    watch.commit()
    return found


def noise(like: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(like) * like.square().mean().sqrt()


@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.GRADIENT])
@pytest.mark.parametrize("seed", range(3))
def test_honest_tensors_whose_sizes_drift_raise_no_alarm(kind: Kind, seed: int) -> None:
    watch, stream = Watch("ab"), Stream(seed)
    for number in range(100):
        stream.size *= 0.9 if number < 50 else 1.08
        assert step(watch, stream, kind, senders="ab") == []


LIES: dict[str, tuple[Kind, Change]] = {
    "zeros": (Kind.ACTIVATION, torch.zeros_like),
    "noise": (Kind.ACTIVATION, noise),
    "flips": (Kind.ACTIVATION, torch.neg),
    "x30": (Kind.ACTIVATION, lambda tensor: 30 * tensor),
    "NaN": (Kind.ACTIVATION, lambda tensor: math.nan * tensor),
    "infinite": (Kind.GRADIENT, lambda tensor: math.inf * tensor),
    "no gradients": (Kind.GRADIENT, torch.zeros_like),
    "x1000": (Kind.GRADIENT, lambda tensor: 1000 * tensor),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_first_lie_of_a_sender_that_is_known_is_noticed(lie: str) -> None:
    kind, change = LIES[lie]
    watch, stream = Watch("ab"), Stream()
    for _ in range(KNOWN_AFTER):
        assert step(watch, stream, kind) == []
    found = step(watch, stream, kind, change, each=1)
    assert [(each.node, each.kind, each.index) for each in found] == [("a", kind, 0)]
    assert 8 <= found[0].deviations <= MOST_DEVIATIONS


@pytest.mark.parametrize("lie", ["zeros", "noise", "flips", "x30", "x1000"])
def test_who_lies_from_the_first_step_on_is_unlike_other_senders(lie: str) -> None:
    kind, change = LIES[lie]
    watch, stream = Watch("abc"), Stream()
    noticed = {each.node for _ in range(KNOWN_AFTER) for each in step(watch, stream, kind, change, "abc")}
    assert noticed == {"a"}


def test_noise_from_a_single_sender_is_noticed_from_the_first_step_on_as_it_shares_no_direction() -> None:
    watch, stream = Watch("a"), Stream()
    assert any(step(watch, stream, Kind.ACTIVATION, noise) for _ in range(KNOWN_AFTER))


def test_a_step_that_is_not_committed_moves_nothing() -> None:
    watch, stream = Watch("a"), Stream()
    for _ in range(KNOWN_AFTER):
        step(watch, stream, Kind.ACTIVATION)
    for _ in range(50):
        watch.begin()
        watch.took(Kind.ACTIVATION, "a", 0, torch.zeros(2, 16, WIDTH))
        watch.unusual()
    assert step(watch, stream, Kind.ACTIVATION) == []


def test_another_generation_of_the_same_stage_remembers_its_senders_and_nobody_else() -> None:
    watch, stream = Watch("ab"), Stream()
    for _ in range(KNOWN_AFTER):
        step(watch, stream, Kind.ACTIVATION, senders="ab")
    assert step(Watch("a", watch), stream, Kind.ACTIVATION, torch.neg, each=1)
    assert not step(Watch("c", watch), stream, Kind.ACTIVATION, torch.neg, each=1)
    assert not step(Watch("a"), stream, Kind.ACTIVATION, torch.neg, each=1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([Kind.ACTIVATION, Kind.GRADIENT]), st.floats(width=32)), max_size=40))
def test_whatever_comes_it_answers_and_keeps_numbers_alone(values: list[tuple[Kind, float]]) -> None:
    watch = Watch("a")
    for number, (kind, value) in enumerate(values):
        watch.begin()
        watch.took(kind, "a", number, torch.full((1, 4, 8), value))
        assert all(0 < each.deviations <= MOST_DEVIATIONS for each in watch.unusual())
        watch.commit()
    assert len(watch._senders) <= 2
    assert not watch._waiting
    assert not watch._looks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_few_numbers_are_taken_of_a_tensor_in_any_precision(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 16, WIDTH).to(dtype)
    numbers = measured(tensor, WIDTH)
    assert numbers.shape == (1 + WIDTH,)
    assert numbers.dtype == torch.float32
    assert numbers[0].item() == pytest.approx(tensor.double().square().mean().sqrt().item(), rel=1e-2)
    torch.testing.assert_close(numbers[1:], tensor.double().sum((0, 1)).float(), rtol=1e-2, atol=1e-2)
    assert measured(tensor, 0).shape == (1,)


def test_of_many_alarms_the_worst_of_each_sender_come_first() -> None:
    found = [Unusual(node, Kind.ACTIVATION, number, 10.0 * number) for node in "ab" for number in range(1, 9)]
    assert [(each.node, each.index) for each in some([*found, Unusual("c", Kind.GRADIENT, 0, 8.0)], 4)] == [
        ("a", 8),
        ("b", 8),
        ("c", 0),
        ("a", 7),
    ]
