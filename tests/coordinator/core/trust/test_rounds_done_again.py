"""In an exchange, other nodes repeat the round of a node that is an island alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from dtfm.coordinator.core.step.commits import learning_rate
from dtfm.coordinator.core.trust.draw import can_do_again, draw
from dtfm.coordinator.core.trust.passed import differing, lacks, read_passed
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, joined
from tests.coordinator.audit_scripts import answer_all, asked, auditor_of, quarantined
from tests.coordinator.core.trust.test_draw import itself
from tests.coordinator.core.trust.test_passed import described
from tests.coordinator.honest_work import commitments
from tests.coordinator.islands import ROUNDS, each_alone, exchange, first_and_others, fresh, islands
from tests.coordinator.script import LAYERS, World

AUDITED = {"trust": {"audit_rate": 1.0}}


def at_the_exchange(*nodes: str) -> World:
    """All have voted for the second exchange. Every round is done again."""
    world = each_alone(*nodes, **AUDITED)
    exchange(world)
    for _ in range(ROUNDS):
        world.step()
    world.automatic_audits = False
    exchange(world)
    return world


def test_an_auditor_is_told_the_samples_and_learning_rates_of_the_round() -> None:
    world = at_the_exchange("a", "b", "c")
    assert {node: len(by) for node, by in asked(world).items()} == {"a": 1, "b": 1, "c": 1}
    audit = world.last_to(auditor_of(world, "b"), "audit")
    assert (audit.node, list(audit.micro_batches)) == ("b", [])
    # Of each step's four micro-batches, a has the first two.
    train = world.state.message.train
    told = [(step.learning_rate, step.clip_norm, step.weight_decay, list(step.borders)) for step in audit.trained]
    assert told == [
        (learning_rate(train, 4), train.clip_norm, train.weight_decay, [10, 11]),
        (learning_rate(train, 5), train.clip_norm, train.weight_decay, [14, 15]),
    ]
    assert {(each.bucket, each.piece) for each in audit.pieces} == {*itertools.product(range(LAYERS), (0, 2))}, (
        "it adds up piece 1 of three"
    )
    assert [(each.piece, [addend.node for addend in each.addends]) for each in audit.sums] == [(1, ["a", "c"])]


def test_what_all_others_find_wrong_goes_and_its_round_counts_for_nothing() -> None:
    world = at_the_exchange("a", "b", "c", "d")
    answer_all(world, of="b", addends=2.0)
    assert quarantined(world) == [("b", Charge.AUDIT, False)]
    assert world.events(ev.StepAborted)[-1].problem == "SETTLED"
    assert world.events(ev.RolledBack)[-1].from_step == 2 * ROUNDS + 1
    assert "b" not in world.plan_in_force.nodes


def test_nobody_keeps_sums_from_being_done_again_by_saying_that_it_kept_nothing() -> None:
    """In an exchange all keep what they sent."""
    world = each_alone("a", "b", "c", **AUDITED)
    for _ in range(ROUNDS):
        world.step()
    world.automatic_audits = False
    for node in "abc":
        world.vote(node, samples=0, loss_sum=0.0, kept=node != "c")
    assert len(world.last_to("a", "audit").sums) == len(world.last_to("b", "audit").sums) == 1


def test_differences_grow_in_a_round_and_are_rounding() -> None:
    world = at_the_exchange("a", "b", "c")
    for by in "abc":
        world.audit(by, addends=0.04)
    assert [(event.clean, event.micro_batches) for event in world.events(ev.WorkAudited)[-3:]] == [
        (True, ROUNDS * {"a": 2}.get(event.node, 1)) for event in world.events(ev.WorkAudited)[-3:]
    ]
    assert world.state.ledger.training.step == 2 * (ROUNDS + 1)


def test_an_answer_may_take_as_long_as_a_round() -> None:
    world = each_alone("a", "b", "c", **AUDITED)
    world.automatic_audits = False
    for _ in range(ROUNDS):
        world.step()
    training = replace(world.state.ledger.training, step_seconds=1000.0)
    world.state = replace(world.state, ledger=replace(world.state.ledger, training=training))
    exchange(world)
    half, twice = (
        world.last_to(auditor_of(world, node), "audit").seconds for node in "ba"
    )  # a does two of four micro-batches
    assert min(half, twice) > ROUNDS * 1000
    assert twice > 2 * ROUNDS * 1000


def test_rounds_that_began_where_nothing_was_audited_are_done_again_by_nobody() -> None:
    """Their moments were not zero. Those of the next plan are."""
    world = each_alone("a", "b", "c")
    run = world.state.run
    trust = run.trust.model_copy(update={"audit_rate": 1.0})
    world.state = replace(world.state, run=run.model_copy(update={"trust": trust}))
    exchange(world)
    assert not world.events(ev.WorkAudited)
    world.lose("c")
    world.settle()
    assert world.state.rounds.restarts
    assert world.last_to("a", "assignment").trained_before == 0
    exchange(world)
    assert {audit.node for audit in world.events(ev.WorkAudited)} == {"a", "b"}


def test_whose_island_has_lost_another_node_in_the_round_is_not_audited() -> None:
    """What that one had done in it, or how it was sent, nobody can do again."""
    world = islands("a", "b", "c", "d", **AUDITED)
    world.step()
    training = world.state.ledger.training
    assert training.debts.alone == {1: "c", 2: "d"}
    before = training.plan
    assert before is not None
    shrunk = joined([replicas(["a"], 2), *before.islands[1:]], before.generation)
    debts = training.debts.with_step(shrunk, 2, 1e-3, at_rest=False)
    assert debts.alone == {1: "c", 2: "d"}
    other = joined([replicas(["a"], 2), replicas(["x"], 1, 1), replicas(["d"], 1, 2)], before.generation)
    assert debts.with_step(other, 3, 1e-3, at_rest=False).alone == {2: "d"}
    assert debts.with_step(other, 3, 1e-3, at_rest=True).alone == {}


def replicas(names: Sequence[str], micro_batches: int, island: int = 0) -> Plan:
    stage = Stage((0, LAYERS), tuple(names), (), island=island)
    return from_routes(0, [stage], [((names[0],), micro_batches)])


def test_what_replicas_compare_of_an_exchange_proves_nobody() -> None:
    """They have the same state, and with it the same lies."""
    world = World(fresh(("a", "b", "c"), AUDITED), lambda _: joined([two_replicas(), replicas(["c"], 2, 1)], 0))
    world.join("a", "b", "c")
    world.settle()
    world.automatic_standbys = False
    exchange(world)
    assert world.state.ledger.training.step == ROUNDS + 1
    of_exchange = [audit for audit in world.events(ev.WorkAudited) if audit.step == ROUNDS + 1]
    assert not of_exchange
    assert {audit.node for audit in world.events(ev.WorkAudited)} == {"a", "b"}, "of the steps"
    for _ in range(ROUNDS):
        world.step()
    world.state = replace(world.state, auditing=replace(world.state.auditing, due={"b": 0}))
    exchange(world)
    assert world.state.auditing.due == {"b": 0}, "nor does it stand for an audit without a result"


def two_replicas() -> Plan:
    return from_routes(0, [Stage((0, LAYERS), ("a", "b"), ())], [(("a",), 1), (("b",), 1)])


def test_who_is_slow_does_not_do_the_round_of_a_fast_one_again_where_another_can() -> None:
    alone = [(0, "a", 8), (1, "b", 5), (2, "c", 1), (3, "d", 1)]
    plan = joined([replicas([name], count, number) for number, name, count in alone], 0)
    for seed in range(20):
        drawn = {each.node: each.by for each in draw(plan, 1.0, Random(seed), itself, plan.nodes, exchanges=True)}
        assert (drawn["a"], drawn["b"]) == ("b", "a")


@pytest.mark.parametrize("seed", range(20))
def test_only_nodes_that_are_islands_alone_repeat_each_others_rounds(seed: int) -> None:
    plan = first_and_others("abcd")  # a and b are the stages of one island
    drawn = draw(plan, 1.0, Random(seed), itself, plan.nodes, exchanges=True)
    assert {(each.node, each.by, each.whole) for each in drawn} == {("c", "d", True), ("d", "c", True)}
    assert can_do_again(plan, "c", True) == ["c", "d"]
    assert can_do_again(plan, "a", True) == ("a",)
    assert can_do_again(plan, "c", False) == ("c",)


def test_in_an_exchange_all_that_have_a_layer_name_its_pieces_and_nothing_goes_between_stages() -> None:
    plan = first_and_others("abc")
    model = replace(described(plan), buckets=LAYERS)
    model = replace(model, workload=replace(model.workload, layers=model.workload.layers[:1] * LAYERS))

    told = {
        node: read_passed(wire.StepReady(**commitments(plan, node, exchanges=True)), plan, node, model, exchanges=True)
        for node in plan.nodes
    }
    assert {hop[:3] for hop in told["a"].sent} == {("a", "c", Kind.REDUCE), ("a", "c", Kind.GATHER)}
    assert differing(told) == []
    assert not any(lacks(plan, node, told[node], exchanges=True) for node in plan.nodes)
    less = replace(told["c"], sent={hop: digest for hop, digest in told["c"].sent.items() if hop[2] != Kind.REDUCE})
    assert "REDUCE" in lacks(plan, "c", less, exchanges=True)
