"""In an exchange others do the round again of whoever is an island alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from dtfm.coordinator.core.audits import Auditing
from dtfm.coordinator.core.step.commits import learning_rate
from dtfm.coordinator.core.trust.draw import can_do_again, draw
from dtfm.coordinator.core.trust.passed import differing, lacks, read_passed
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from tests.coordinator.audit_scripts import answer_all, asked, auditor_of, quarantined
from tests.coordinator.core.trust.test_draw import itself
from tests.coordinator.core.trust.test_passed import described
from tests.coordinator.honest_work import commitments
from tests.coordinator.islands import ROUNDS, each_alone, exchange, first_and_others
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
    assert [(step.learning_rate, list(step.borders)) for step in audit.trained] == [
        (learning_rate(train, 4), [10, 11]),
        (learning_rate(train, 5), [14, 15]),
    ]
    assert {each.piece for each in audit.pieces} == {0, 2}, "it adds up piece 1 of three"
    assert [(each.piece, [addend.node for addend in each.addends]) for each in audit.sums] == [(1, ["a", "c"])]


def test_what_all_others_find_wrong_goes_and_its_round_counts_for_nothing() -> None:
    world = at_the_exchange("a", "b", "c", "d")
    answer_all(world, of="b", addends=2.0)
    assert quarantined(world) == [("b", Charge.AUDIT, False)]
    assert world.events(ev.StepAborted)[-1].problem == "SETTLED"
    assert world.events(ev.RolledBack)[-1].from_step == 2 * ROUNDS + 1
    assert "b" not in world.plan_in_force.nodes


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
    assert world.last_to("a", "audit").seconds > 2 * ROUNDS * 1000


def test_the_round_in_which_the_coordinator_has_started_is_done_again_by_nobody() -> None:
    """It may have begun where nothing was audited, with moments that are not zero."""
    world = each_alone("a", "b", "c", **AUDITED)
    world.step()
    world.state = replace(world.state, auditing=Auditing(since=1))
    exchange(world)
    assert not [audit for audit in world.events(ev.WorkAudited) if audit.step == ROUNDS + 1]
    exchange(world)
    assert {audit.node for audit in world.events(ev.WorkAudited) if audit.step == 2 * (ROUNDS + 1)} == {*"abc"}


def test_who_began_within_a_round_is_not_audited_before_the_next() -> None:
    world = at_the_exchange("a", "b", "c")
    debts = world.state.ledger.training.debts
    assert {island: len(steps) for island, steps in debts.of_round.items()} == {0: ROUNDS, 1: ROUNDS, 2: ROUNDS}
    assert len(debts.rates) == ROUNDS
    world.automatic_audits = True
    for by in "abc":
        world.audit(by)
    world.step()
    world.lose("c")
    world.settle()
    exchange(world)
    of_this = [audit for audit in world.events(ev.WorkAudited) if audit.step == 3 * (ROUNDS + 1)]
    assert {audit.node for audit in of_this} == {"a", "b"}


@pytest.mark.parametrize("seed", range(20))
def test_only_whoever_is_an_island_alone_does_the_rounds_of_such_again(seed: int) -> None:
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
