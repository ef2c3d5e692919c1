"""At whom a step stands: `core/step/beginning.py`."""

from __future__ import annotations

from dtfm.coordinator.core.step.beginning import stalled
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes

CHAIN: Plan = from_routes(1, [Stage((n, n + 1), (name,), ()) for n, name in enumerate("abc")], [(["a", "b", "c"], 4)])
EVERY = range(4)


def progress(activations: object = (), gradients: object = (), finished: object = ()) -> wire.Progress:
    return wire.Progress(activations=activations, gradients=gradients, finished=finished)  # type: ignore[arg-type]


def test_micro_batches_stand_between_a_node_that_has_them_and_the_next_that_lacks_them() -> None:
    said = {"a": progress(), "b": progress(EVERY), "c": progress()}
    assert stalled(CHAIN, said) == {"b", "c"}


def test_the_last_one_has_all_that_it_needs() -> None:
    said = {"a": progress(), "b": progress(EVERY), "c": progress([0, 1, 2])}
    assert stalled(CHAIN, said) == {"c"}


def test_who_has_a_gradient_and_is_not_done() -> None:
    said = {"a": progress(), "b": progress(EVERY, EVERY), "c": progress(EVERY, (), EVERY)}
    assert stalled(CHAIN, said) == {"b"}


def test_who_is_done_and_whose_neighbour_says_that_it_has_no_gradient() -> None:
    said = {"a": progress(), "b": progress(EVERY), "c": progress(EVERY, (), EVERY)}
    assert stalled(CHAIN, said) == {"b", "c"}


def test_nobody_if_all_is_done_but_the_reduction() -> None:
    done = progress(EVERY, EVERY, EVERY)
    assert stalled(CHAIN, {"a": done, "b": done, "c": done}) == frozenset()


def test_a_node_of_which_nothing_is_known_has_nothing() -> None:
    assert stalled(CHAIN, {}) == {"a", "b"}
