"""One price for all layouts, and the cost of a change from one to another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.scheduler.cost.exchange import exchange_seconds, tokens_needed
from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.cost.state_transfer import Holdings
from dtfm.scheduler.model.decision import Reason
from dtfm.scheduler.model.plan import Plan, Stage, joined
from dtfm.scheduler.model.problem import Problem, draft_of
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.replan.decision import Standing, decide
from dtfm.scheduler.replan.price import Terms, price_of_layout
from tests.scheduler.clusters import even_workload, uniform_cluster

WORKLOAD = replace(even_workload(layers=2, micro_batches=6), momentum_bytes_per_parameter_byte=1.0)
EACH = 2e7
"""Bytes of a layer's parameters."""
CLUSTER = uniform_cluster(4, bandwidth=1e8)
PROBLEM = Problem(CLUSTER, WORKLOAD)


def alone(node: str, number: int, share: int) -> Plan:
    return Plan(0, (Stage((0, 2), (node,), (share,), island=number),), ())


def layout(*islands: Plan, rounds: Rounds = NO_ROUNDS) -> Plan:
    return replace(joined(islands, 1), rounds=rounds)


def test_a_plan_without_rounds_costs_its_step_and_a_layout_the_slowest_island_with_the_exchange_and_its_tokens() -> (
    None
):
    one = alone("n0", 0, 6)
    step = simulate(PROBLEM, draft_of(one, CLUSTER))
    assert price_of_layout(PROBLEM, one, Terms(overhead=0.5)).compared == pytest.approx(step + 0.5)
    several = layout(alone("n0", 0, 4), alone("n1", 1, 2))
    found = price_of_layout(PROBLEM, several, Terms(30, 0.5))
    own = Problem(CLUSTER.only([0]), replace(WORKLOAD, micro_batches=4))
    slowest = simulate(own, draft_of(alone("n0", 0, 4), CLUSTER))
    exchange = exchange_seconds(CLUSTER, WORKLOAD, several)
    assert (found.step, found.exchange) == pytest.approx((slowest + 0.5, exchange))
    assert found.compared == pytest.approx((slowest + 0.5 + exchange / 30) * tokens_needed(2, WORKLOAD, 30))


def fetched(before: Plan, after: Plan) -> tuple[int, float]:
    found = Holdings.of(PROBLEM, before).fetch_layout(after)
    return found.nodes, found.size


ROUNDS = Rounds(0, 100, 10)
MOVED, SHARED = 2 * EACH * (1 + 2 + 1), 2 * EACH * (1 + 1)
"""An island's whole state: weights, AdamW's moments, the momentum of exchanges. Then the part that islands share."""


def test_who_comes_to_an_island_that_goes_on_fetches_its_moments_too_from_its_own_nodes() -> None:
    before = layout(alone("n0", 0, 3), alone("n1", 1, 3), rounds=ROUNDS)
    pair = Plan(0, (Stage((0, 2), ("n0", "n1"), (3, 3), island=0),), ())
    assert fetched(before, layout(pair)) == (1, MOVED)  # what n1 has is another island's
    assert fetched(before, layout(alone("n0", 0, 3), alone("n1", 1, 3))) == (0, 0.0)
    bandwidth = CLUSTER.bandwidth.copy()
    bandwidth[1, 2] = 1e3  # nobody asks n1
    slow = Problem(replace(CLUSTER, bandwidth=bandwidth), WORKLOAD)
    joins = Plan(0, (Stage((0, 2), ("n0", "n2"), (2, 1), island=0),), ())
    fetch = Holdings.of(slow, before).fetch_layout(layout(joins, alone("n1", 1, 3)))
    assert (fetch.nodes, fetch.size) == (1, MOVED)
    assert fetch.seconds == pytest.approx(MOVED / 1e8 + 1e-3)


@pytest.mark.parametrize(("rounds", "waits"), [(ROUNDS, False), (NO_ROUNDS, True)])
def test_a_new_island_begins_with_what_all_share_and_with_rounds_copies_it_while_others_train(
    rounds: Rounds, waits: bool
) -> None:
    before = layout(alone("n0", 0, 3), alone("n1", 1, 3), rounds=rounds)
    more = layout(alone("n0", 0, 2), alone("n1", 1, 2), alone("n2", 2, 2))
    assert fetched(before, more) == ((1, SHARED) if waits else (0, 0.0))
    moves = layout(alone("n0", 0, 3), alone("n1", 2, 3))  # n1 keeps what it has, with moments of zero
    assert fetched(before, moves) == (0, 0.0)
    halves = Stage((0, 1), ("n1",), (3,), island=2), Stage((1, 2), ("n0",), (3,), island=2)
    assert fetched(before, layout(Plan(0, halves, ((),)))) == (0, 0.0)


def test_one_decision_for_layouts_with_islands_too() -> None:
    two = layout(alone("n0", 0, 3), alone("n1", 1, 3), rounds=ROUNDS)
    three = layout(alone("n0", 0, 2), alone("n1", 1, 2), alone("n2", 2, 2))
    three = replace(three, idle=("n3",))
    terms, standing = Terms(30), Standing.of(PROBLEM, two)
    assert standing.obstacle is None
    assert decide(PROBLEM, standing, three, terms, horizon=1e6).reason is Reason.FASTER
    assert decide(PROBLEM, standing, three, terms, horizon=1e6, uncertainty=0.9).reason is Reason.KEPT
    same = decide(PROBLEM, Standing.of(PROBLEM, three), replace(three, generation=5), terms, horizon=1e6)
    assert (same.reason, same.plan) == (Reason.KEPT, three)
    pair = Plan(0, (Stage((0, 2), ("n0", "n2"), (2, 1), island=0),), ())
    joins = replace(layout(pair, alone("n1", 1, 3)), idle=("n3",))
    waiting = decide(PROBLEM, standing, joins, terms, horizon=2.0)
    assert waiting.reason is Reason.KEPT
    assert "less than the required 3%, as nodes would wait 2 s for state." in waiting.sentence
    left = Problem(CLUSTER.only([0, 2, 3]), WORKLOAD)
    assert Standing.of(left, two).obstacle is Reason.NODE_LOST
    small = replace(CLUSTER, nodes=tuple(replace(node, memory_bytes=1e8) for node in CLUSTER.nodes))
    assert Standing.of(Problem(small, WORKLOAD), two).obstacle is Reason.INFEASIBLE
    longer = Workload(WORKLOAD.layers * 2, 6)
    assert Standing.of(Problem(CLUSTER, longer), two).obstacle is Reason.REQUESTED
