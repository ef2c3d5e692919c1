"""The memory that a change of plan takes: `replan/switch.py`, `cost/room.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.command.planning.rented import parse_gpus, parse_links, parse_size, rented_cluster
from dtfm.scheduler.cost.in_flight import depths
from dtfm.scheduler.cost.room import freeing_seconds, place_of, room_of
from dtfm.scheduler.cost.state_transfer import fetching_seconds
from dtfm.scheduler.islands.layout import lay_out
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.decision import Decision, Infeasible, Reason
from dtfm.scheduler.model.keeping import keepings
from dtfm.scheduler.model.memory import (
    BUS_BYTES_PER_SECOND,
    DISK_BYTES_PER_SECOND,
    LADDER,
    Checkpointing,
    Keeping,
    OptimizerState,
)
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.request import Shape
from dtfm.scheduler.model.sketch import position_of
from dtfm.scheduler.model.workload import Layer, Workload
from dtfm.scheduler.replan.decision import Standing, decide
from dtfm.scheduler.replan.price import Terms
from dtfm.scheduler.replan.switch import MARGIN, Before, Change
from dtfm.scheduler.schedule import schedule
from tests.scheduler.llama import llama
from tests.scheduler.replan.tight import disturbed, lacking, tight_network

LAYERS = (Layer("", 1e9, 100.0, 1e-3),) * 6
HOSTED = Keeping(Checkpointing.NONE, OptimizerState.HOST)


def cluster(memory: float, host: float | None = None, flops: float = 1e9) -> Cluster:
    nodes = Node("a", 1e9, memory, host_memory_bytes=host), Node("b", flops, memory, host_memory_bytes=host)
    return Cluster(nodes, np.full((2, 2), 1e-3), np.full((2, 2), 1e6))


def plan(cut: int, keeping: tuple[Keeping, ...] = ()) -> Plan:
    stages = Stage((0, cut), ("a",), (), keeping=keeping), Stage((cut, 6), ("b",), (), keeping=keeping)
    return from_routes(1, stages, [(("a", "b"), 4)])


def made(problem: Problem, draft: Draft) -> Plan:
    return draft.plan(problem.cluster, depths(problem, draft), keepings(problem, draft), 2)


def short_of_memory(problem: Problem, plan: Plan, draft: Draft) -> tuple[str, float] | None:
    """The node that lacks most while ``plan`` becomes ``draft``, and the bytes."""
    found = Before.of(problem, plan).freeing(made(problem, draft))
    worst = max(found, key=lambda each: (each.lacks, each.node), default=None)
    return None if worst is None else (problem.cluster.ids[worst.node], worst.lacks)


def draft(cut: int, groups: tuple[tuple[int, ...], ...] = ((0,), (1,))) -> Draft:
    return Draft.of(groups, (0, cut, 6), (np.array([4]),) * 2, (np.array([[4]]),))


# A layer's state is 400 bytes on the device; or 200 there, and 300 in the host's memory.
@pytest.mark.parametrize(
    ("groups", "cut", "node", "held"),
    [
        (((0,), (1,)), 4, "a", 4 * 400),  # one layer more
        (((0,), (1,)), 2, "b", 4 * 400),
        (((1,), (0,)), 3, "b", 6 * 400),  # all others
    ],
)
def test_layers_that_are_in_both_stages_count_once(
    groups: tuple[tuple[int, ...], ...], cut: int, node: str, held: float
) -> None:
    workload = Workload(LAYERS, 4)
    assert short_of_memory(Problem(cluster(held), workload), plan(3), draft(cut, groups)) is None
    assert short_of_memory(Problem(cluster(held - 2), workload), plan(3), draft(cut, groups)) == (node, 2.0)
    assert short_of_memory(Problem(cluster(1.0), workload), plan(3), draft(3)) is None


def test_the_hosts_memory_may_be_short() -> None:
    workload = Workload(LAYERS, 4, optimizer_state=OptimizerState.HOST)
    assert short_of_memory(Problem(cluster(1e4, 1200.0), workload), plan(3, (HOSTED,)), draft(4)) is None
    assert short_of_memory(Problem(cluster(1e4, 1198.0), workload), plan(3, (HOSTED,)), draft(4)) == ("a", 2.0)


def test_of_state_that_moves_to_the_device_only_the_part_already_there_counts_once() -> None:
    """Node a trades layers 0 to 2 for layers 1 to 5: of each that it keeps, 200 of 400 bytes are on the device already."""
    workload = Workload(LAYERS, 4, optimizer_state=None)
    new = Draft.of(((1,), (0,)), (0, 1, 6), (np.array([4]),) * 2, (np.array([[4]]),))
    for memory, lacks in ((3 * 200 + 5 * 400 - 2 * 200, None), (3 * 200 + 5 * 400 - 2 * 200 - 2, ("a", 2.0))):
        assert short_of_memory(Problem(cluster(memory, 1e5), workload), plan(3, (HOSTED,)), new) == lacks


@given(
    old=st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda cuts: cuts[0] < cuts[1]),
    cut=st.integers(1, 5),
    seat=st.integers(0, 1),
    before=st.sampled_from(LADDER),
    after=st.sampled_from(LADDER),
    copy=st.sampled_from((0.0, 0.5)),
)
def test_a_switch_takes_the_memory_that_a_count_by_layer_gives(
    old: tuple[int, int], cut: int, seat: int, before: Keeping, after: Keeping, copy: float
) -> None:
    """On the device and in the host's memory, each layer takes its larger size of before and after."""
    workload = Workload(
        tuple(Layer("", 1e9, 100.0 * (1 + index), 1e-3) for index in range(6)),
        4,
        copy_bytes_per_parameter_byte=copy,
        checkpointing=after.checkpointing,
        optimizer_state=after.optimizer_state,
    )
    new = ((0, cut), (cut, 6))[seat]
    others = tuple(Stage(layers, ("c",), ()) for layers in ((0, old[0]), (old[1], 6)))  # a node that has left
    incumbent = Plan(1, (others[0], Stage(old, ("a",), (), keeping=(before,)), others[1]), ((), ()))

    def held(layers: tuple[int, int], layer: int, keeping: Keeping) -> tuple[float, float]:
        size = 100.0 * (1 + layer) if layers[0] <= layer < layers[1] else 0.0
        if keeping.optimizer_state is OptimizerState.DEVICE:
            return size * (4 + copy), 0.0
        return size * ((copy or 1) + 1), size * 3

    both = [(held(old, layer, before), held(new, layer, after)) for layer in range(6)]
    device, host = (sum(max(one[part], other[part]) for one, other in both) for part in (0, 1))
    groups = ((0,), (1,)) if seat == 0 else ((1,), (0,))
    for memory, beside in ((device, host), (device - 2, host), (device, host - 2)):
        beside = max(beside, 1.0)
        nodes = Node("a", 1e9, memory, host_memory_bytes=beside), Node("b", 1e9, 1e9, host_memory_bytes=1e9)
        two = Cluster(nodes, np.full((2, 2), 1e-3), np.full((2, 2), 1e6))
        stays = new == old and after.optimizer_state is before.optimizer_state  # another checkpointing moves nothing
        lacks = 0.0 if stays else max(device - memory, host - beside)
        found = short_of_memory(Problem(two, workload), incumbent, draft(cut, groups))
        assert found == (("a", lacks) if lacks > 1 else None)


def faster_beside(memory: float, *, horizon: float = 1e6, flops: float = 5e9) -> Decision:
    """b computes faster than a, and would hold layers 0 to 4 instead of 3 to 5: six in all until it has changed."""
    problem = Problem(cluster(memory, flops=flops), Workload(LAYERS, 4))
    standing = Standing.of(problem, plan(3), Shape(most_stages=2))
    better = made(problem, draft(5, ((1,), (0,))))
    return decide(problem, standing, better, Terms(), horizon=horizon)


def test_a_node_without_memory_to_change_frees_some_first_if_that_gains_enough() -> None:
    beside, freeing = faster_beside(6 * 400.0 + 50), faster_beside(5 * 400.0 + 50)
    assert [each.reason for each in (beside, freeing)] == [Reason.FASTER] * 2
    assert (beside.plan.frees_first, freeing.plan.frees_first) == ((), ("b",))
    assert "free the old one first" in freeing.sentence
    assert "b lacks the most, 0.0 MiB" in freeing.sentence
    assert "free" not in beside.sentence
    moved = 300.0  # layer 5 alone is not in both
    assert freeing.predicted.migration_seconds - beside.predicted.migration_seconds == pytest.approx(
        moved / DISK_BYTES_PER_SECOND
    )


def test_a_change_in_which_a_node_frees_first_must_gain_twice_the_margin() -> None:
    """A step takes 7 % less, and the change 3 % of the horizon."""
    flops, seconds = 1.7e9, faster_beside(6 * 400.0 + 50).predicted.migration_seconds
    beside, freeing = (faster_beside(n * 400.0 + 50, flops=flops, horizon=seconds / 0.03) for n in (6, 5))
    gain = 1 - beside.predicted.iteration_seconds / freeing.predicted.iteration_seconds - 0.03
    assert MARGIN < gain < 2 * MARGIN
    assert (beside.reason, freeing.reason) == (Reason.FASTER, Reason.KEPT)
    assert "b lacks 0.0 MiB of memory to hold its old stage and its new one" in freeing.sentence


def test_a_plan_that_cannot_stay_is_replaced_by_one_that_frees_first() -> None:
    problem = Problem(cluster(5 * 400.0 + 50, flops=5e9), Workload(LAYERS, 4))
    standing = Standing(Before.of(problem, plan(3)), Reason.INFEASIBLE)
    found = decide(problem, standing, made(problem, draft(5, ((1,), (0,)))), Terms(), horizon=1e6)
    assert (found.reason, found.plan.frees_first) == (Reason.INFEASIBLE, ("b",))


@pytest.mark.parametrize(
    ("host", "where", "seconds"),
    [
        (None, Keeping(), 300.0 / DISK_BYTES_PER_SECOND),  # it has no other memory
        (300.0, Keeping(), 300.0 / BUS_BYTES_PER_SECOND),
        (299.0, Keeping(), 300.0 / DISK_BYTES_PER_SECOND),
        (6 * 300.0, HOSTED, 0.0),  # it is in the host's memory already
        (6 * 300.0 - 1, HOSTED, 300.0 / DISK_BYTES_PER_SECOND),
    ],
)
def test_state_in_the_way_goes_to_the_hosts_memory_if_that_has_room_otherwise_to_the_disk(
    host: float | None, where: Keeping, seconds: float
) -> None:
    """Node b holds layers 3 to 5 and gets 0 to 4: layer 5 is in the way."""
    problem = Problem(cluster(2000.0, host), Workload(LAYERS, 4, optimizer_state=where.optimizer_state))
    held = (where, where) if where != Keeping() else ()
    room = room_of(problem, plan(3, held[:1]))
    assert freeing_seconds(room, 1, 0, 5, place_of(where)) == pytest.approx(seconds)


def test_the_search_and_the_decision_price_a_change_alike() -> None:
    """For state that can be in one place alone."""
    problem = Problem(cluster(5 * 400.0 + 50, flops=5e9), Workload(LAYERS, 4))
    before, new = Before.of(problem, plan(3)), draft(5, ((1,), (0,)))
    change = Change(before, 0.5, 100.0)
    switch = before.switch(made(problem, new))
    assert switch.freeing
    exact = change.surcharge(new.groups, new.cuts)
    assert exact == pytest.approx(0.5 * (switch.seconds + MARGIN * 100.0))
    assert 0.5 * fetching_seconds(change.fetching(), position_of(new.groups, new.cuts, 2)) == pytest.approx(
        exact, rel=1e-3
    )


EIGHT = rented_cluster(parse_gpus("8x RTX 4090"), *parse_links("1Gbit/s,20ms"), parse_size("32GiB"), "bf16")


@cache
def on_eight(evaluations: int) -> Plan:
    return schedule(EIGHT, llama("7B"), stages=8, evaluations=evaluations, generation=1).plan


@pytest.mark.parametrize("gone", range(8))
@pytest.mark.parametrize("evaluations", [300, pytest.param(3_000, marks=pytest.mark.soak)])
def test_each_loss_of_7b_on_eight_rtx_4090_gives_a_plan_for_which_no_survivor_lacks_memory(
    gone: int, evaluations: int
) -> None:
    before = on_eight(evaluations)
    left = EIGHT.only([n for n in range(8) if n != gone])
    found = schedule(left, llama("7B"), before, evaluations=evaluations, generation=2)
    assert found.reason is Reason.NODE_LOST
    first = frozenset(found.plan.frees_first)
    assert not lacking(left, llama("7B"), before, found.plan, first)
    assert first == {*lacking(left, llama("7B"), before, found.plan, frozenset())}


def changes(seeds: range, *, islands: bool) -> Iterator[tuple[Decision, dict[str, float], dict[str, float]]]:
    """The decisions after something has happened to tight networks, the bytes that nodes lack then, and the bytes that they
    would lack if none freed first."""
    for seed in seeds:
        cluster, workload = tight_network(seed, islands=islands)
        workload = workload.with_rounds() if islands else workload

        def ask(now: Cluster, incumbent: Plan | None, workload: Workload = workload) -> Decision:
            if not islands:
                return schedule(now, workload, incumbent, evaluations=300, generation=2)
            numbers = {} if incumbent is None else {n: s.island for s in incumbent.stages for n in s.replicas}
            return lay_out(now, workload, incumbent, length=30, numbers=numbers, evaluations=60, generation=2)

        try:
            before = replace(ask(cluster, None).plan, generation=1)
            now = disturbed(cluster, before, seed)
            found = ask(now, before)
        except Infeasible:
            continue
        if found.reason is not Reason.KEPT:
            first, nobody = frozenset(found.plan.frees_first), frozenset[str]()
            short = lacking(now, workload, before, found.plan, first)
            yield found, short, lacking(now, workload, before, found.plan, nobody)


def check_changes(seeds: range, *, islands: bool, least: int) -> None:
    """Checks that at least this number of changes are made, and that a node frees first in some of them."""
    found = [*changes(seeds, islands=islands)]
    assert len(found) >= least
    assert not [short for _, short, _ in found if short]
    assert any(each.plan.frees_first for each, *_ in found)
    assert all({*each.plan.frees_first} == {*would} for each, _, would in found)


@pytest.mark.parametrize("islands", [False, True])
def test_in_a_tight_network_no_node_lacks_memory_while_plans_change(islands: bool) -> None:
    check_changes(range(4 if islands else 12), islands=islands, least=2)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("islands", [False, True])
def test_in_200_tight_networks_no_node_lacks_memory_while_plans_change(islands: bool) -> None:
    check_changes(range(100, 300), islands=islands, least=100)
