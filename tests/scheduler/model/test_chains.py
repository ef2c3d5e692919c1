"""Which micro-batch goes where: by the rule, evenly spread, and the same however it is computed."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from dtfm.scheduler.model.chains import (
    chains,
    dealt,
    held_out_chains,
    micro_batches_of,
    places,
    settled,
)
from dtfm.scheduler.model.plan import Plan, Stage, Takeover, check, from_routes

Ints = NDArray[np.int64]


@st.composite
def numbered_flows(draw: st.DrawFn) -> tuple[Ints, list[Ints]]:
    """Loads and flows that fit together: they come from some chains."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    chain = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    drawn = np.array(draw(st.lists(chain, min_size=1, max_size=30)), dtype=np.int64)
    flows = []
    for stage, (senders, receivers) in enumerate(itertools.pairwise(sizes)):
        counts = np.zeros((senders, receivers), dtype=np.int64)
        np.add.at(counts, (drawn[:, stage], drawn[:, stage + 1]), 1)
        flows.append(counts)
    return np.bincount(drawn[:, 0], minlength=sizes[0]), flows


def by_the_rule(loads: Ints, flows: list[Ints]) -> list[list[int]]:
    """The definition, word for word."""
    at = [0] * int(loads.sum())
    columns = []
    for counts in [loads[None], *flows]:
        sent, received, load = np.zeros_like(counts), np.zeros(counts.shape[1], dtype=np.int64), counts.sum(axis=0)
        column = []
        for u in at:
            keys = {
                v: (sent[u, v] + 0.5) / counts[u, v] + (received[v] + 0.5) / load[v]
                for v in range(counts.shape[1])
                if counts[u, v] > sent[u, v]
            }
            v = min(keys, key=lambda v: (keys[v], v))
            sent[u, v] += 1
            received[v] += 1
            column.append(v)
        columns.append(column)
        at = column
    return [list(chain) for chain in zip(*columns, strict=True)]


@given(numbered_flows())
def test_every_micro_batch_goes_by_the_rule(drawn: tuple[Ints, list[Ints]]) -> None:
    loads, flows = drawn
    assert places(loads, flows).tolist() == by_the_rule(loads, flows)


@given(numbered_flows())
def test_all_flows_are_used_up(drawn: tuple[Ints, list[Ints]]) -> None:
    loads, flows = drawn
    found = places(loads, flows)
    assert np.bincount(found[:, 0], minlength=len(loads)).tolist() == loads.tolist()
    for stage, counts in enumerate(flows):
        again = np.zeros_like(counts)
        np.add.at(again, (found[:, stage], found[:, stage + 1]), 1)
        assert again.tolist() == counts.tolist()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_a_senders_micro_batches_are_spread_over_the_step(counts: list[int]) -> None:
    receivers = dealt(np.array(counts))
    for receiver, count in enumerate(counts):
        numbers = np.flatnonzero(receivers == receiver)
        even = (np.arange(count) + 0.5) / max(count, 1) * len(receivers)
        assert len(numbers) == count
        assert (np.abs(numbers + 0.5 - even) <= len(counts)).all()


def test_a_large_step_takes_little_time() -> None:
    """2,048 micro-batches through 20 stages of 128 nodes: a tenth of a second where nothing else runs."""
    random = np.random.default_rng(0)
    sizes, micro_batches = [128] * 20, 2048
    at = [random.integers(0, size, micro_batches) for size in sizes]
    flows = []
    for a, b in itertools.pairwise(at):
        counts = np.zeros((128, 128), dtype=np.int64)
        np.add.at(counts, (a, b), 1)
        flows.append(counts)
    taken = []
    for _ in range(3):  # the collector of garbage may take as long in one of them
        began = time.process_time()
        places(np.bincount(at[0], minlength=128), flows)
        taken.append(time.process_time() - began)
    assert min(taken) < 1


STAGES = (Stage((0, 1), ("a", "b"), ()), Stage((1, 2), ("c", "d"), ()))
PLAN = from_routes(1, STAGES, [(("a", "c"), 4), (("b", "c"), 2), (("b", "d"), 2)], ("spare",))


def test_a_plans_chains_and_each_nodes_numbers() -> None:
    assert Counter(chains(PLAN)) == {("a", "c"): 4, ("b", "c"): 2, ("b", "d"): 2}
    assert [first for first, _ in chains(PLAN)] == ["a", "b"] * 4
    assert micro_batches_of(PLAN)["a"] == (0, 2, 4, 6)
    assert micro_batches_of(PLAN).keys() == {"a", "b", "c", "d"}


def test_the_heirs_of_a_lost_node_get_its_micro_batches_in_turn_and_nobody_else_notices() -> None:
    first = replace(PLAN.stages[0], replicas=("b",), loads=(8,))
    plan = replace(PLAN, stages=(first, PLAN.stages[1]), takeovers=(Takeover(0, "a", 0, (("b", 4),)),))
    check(plan, 2, 8)
    assert chains(plan) == tuple(("b", last) for _, last in chains(PLAN))
    assert settled(plan) == from_routes(1, plan.stages, [(("b", "c"), 6), (("b", "d"), 2)], ("spare",))
    assert settled(PLAN) is PLAN


def test_held_out_micro_batches_are_spread_over_the_nodes_like_training_ones() -> None:
    assert Counter(first for first, _ in held_out_chains(PLAN, 4)) == {"a": 2, "b": 2}
    assert held_out_chains(PLAN, 20) == (*chains(PLAN), *chains(PLAN), *chains(PLAN)[:4])
    assert held_out_chains(PLAN, 0) == ()


@pytest.mark.parametrize("replicas", [1, 3])
def test_one_stage_has_no_flows(replicas: int) -> None:
    names = tuple(f"n{number}" for number in range(replicas))
    plan = Plan(1, (Stage((0, 1), names, (2,) * replicas),), ())
    assert chains(plan) == tuple((name,) for name in names) * 2
