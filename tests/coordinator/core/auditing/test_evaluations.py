"""An evaluation is audited in the step after it, and its loss counts once that is committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.auditing.limits import device_kinds, limits
from dtfm.coordinator.core.state import Pausing, Stepping
from dtfm.coordinator.core.trust.strikes import Record, Strike
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.rounding import Seen, sort_of
from dtfm.coordinator.log.standing import PROVEN_AFTER, Standing, earned
from dtfm.protos import MOST_HELD_OUT_AUDITED, control_pb2 as wire
from dtfm.protos.frame import Kind
from tests.coordinator.answers import DIGEST, evaluated
from tests.coordinator.audit_scripts import (
    all_find_it_right,
    all_vote,
    asked,
    auditing,
    auditor_of,
    quarantined,
    replicas,
    squares,
)
from tests.coordinator.honest_work import digest, hops, passed
from tests.coordinator.ledgers import altered
from tests.coordinator.script import LEASE, LONG, World, refusal_of
from tests.coordinator.strangers import come, open_run

SQUARE = ("a", "b", "c", "d")
HELD_OUT = 4
"""Micro-batches in an evaluation: by squares a and c have 0 and 2, b and d have 1 and 3."""

NEXT_TO_NOTHING = 1e-9
"""Of training work, and one held-out micro-batch a stage."""


def evaluating(*nodes: str, planner: Any = replicas, rate: float = NEXT_TO_NOTHING, **changes: Any) -> World:
    """A world in which step 1 is committed, and all have reported the held-out loss after it."""
    world = auditing(*nodes, planner=planner, rate=rate, train={"steps": 500, "evaluate_every": 1}, **changes)
    all_vote(world)
    all_find_it_right(world)
    assert world.state.ledger.training.step == 1
    world.evaluate()
    return world


def orders(world: World) -> dict[str, wire.Audit]:
    """By node, what is done again of the evaluation."""
    assert isinstance(world.state.phase, Stepping)
    return {audit.order.node: audit.order for audit in world.state.phase.audits if audit.order.evaluation}


def losses(world: World) -> list[tuple[int, float]]:
    return [(event.step, event.loss) for event in world.events(ev.Evaluated)]


def all_answer(world: World, of: str, **about_it: Any) -> None:
    """Audits of the evaluation of this node are answered as given, and all others that all is right; until the step is over."""
    attempt = world.state.ledger.training.generation, world.state.ledger.training.step
    while (world.state.ledger.training.generation, world.state.ledger.training.step) == attempt:
        assert isinstance(world.state.phase, Stepping)
        by = min(node for audit in world.state.phase.audits for node in audit.awaited)
        order = world.last_to(by, "audit")
        world.audit(by, **(about_it if (order.node, order.evaluation) == (of, True) else {}))


def test_a_loss_is_logged_once_what_is_drawn_of_it_was_found_right() -> None:
    world = evaluating("a", "b", "c")
    assert losses(world) == []
    all_vote(world)
    (accused,) = asked(world)
    assert world.state.ledger.training.step == 1
    assert losses(world) == []
    world.audit(auditor_of(world, accused))
    assert world.state.ledger.training.step == 2
    assert losses(world) == [(1, 2.0)]
    assert world.state.evaluations.keys() == {2}
    names = world.names()
    assert names.index("evaluated") < len(names) - 1 - names[::-1].index("step_committed")
    (found,) = world.events(ev.WorkAudited)
    assert (found.why, found.micro_batches, found.errors, found.clean) == ("evaluation", 1, {"evaluations": 0.0}, True)
    assert world.refolded() == world.state.ledger


def test_an_order_names_what_both_ends_voted_and_what_was_reported() -> None:
    world = evaluating(*SQUARE, planner=squares, rate=1.0)
    all_vote(world)
    found = orders(world)
    assert found.keys() == set("abcd")
    for node, before, after, mine in (("a", "", "c", [0, 2]), ("d", "b", "", [1, 3])):
        order = found[node]
        assert (order.step, order.HasField("bucket"), [*order.pieces]) == (2, False, [])
        assert [each.number for each in order.micro_batches] == mine
        for each in order.micro_batches:
            assert (each.previous, each.next, each.gradient_in, each.gradient_out) == (before, after, b"", b"")
            hop = (before or node, after or node, Kind.EVALUATION, each.number, 0)
            assert (each.activation_in, each.activation_out) == ((b"", digest(hop)) if after else (digest(hop), b""))
            assert each.loss == (0.0 if after else 2.0)


def test_who_reports_another_loss_goes_and_no_weights_are_undone() -> None:
    world = evaluating("a", "b", "c")
    all_vote(world)
    (accused,) = asked(world)
    all_answer(world, accused, evaluations=0.5)
    assert quarantined(world) == [(accused, Charge.AUDIT, False)]
    assert "in the evaluation after step 1" in world.events(ev.NodeQuarantined)[0].reason
    assert [(event.node, event.clean, event.why) for event in world.events(ev.WorkAudited)] == [
        (accused, False, "evaluation")
    ]
    assert losses(world) == []
    assert not world.events(ev.RolledBack)
    assert world.state.ledger.training.step == 1
    world.settle()
    all_vote(world)
    assert world.state.ledger.training.step == 2
    assert losses(world) == [], "it is lost"
    world.evaluate()
    all_vote(world)
    all_find_it_right(world)
    assert losses(world) == [(2, 2.0)]


def test_who_says_that_a_right_loss_is_wrong_goes() -> None:
    world = evaluating("a", "b", "c")
    all_vote(world)
    (accused,) = asked(world)
    by = auditor_of(world, accused)
    world.audit(by, evaluations=0.5)
    world.audit(auditor_of(world, accused))
    assert [(node, charge) for node, charge, _ in quarantined(world)] == [(by, Charge.AUDIT)]


def said_otherwise(world: World, node: str, field: str, salt: str | None) -> list[wire.StepReady.Passed]:
    """What the node names, with other digests of the evaluation; None: without it."""
    at = 0 if field == "sent" else 1
    mine = [hop for hop in hops(world.plan_in_force, HELD_OUT) if hop[at] == node]
    held_out = [hop for hop in mine if hop[2] == Kind.EVALUATION]
    assert held_out
    told = passed([hop for hop in mine if hop not in held_out], at=1 - at)
    return told if salt is None else told + passed(held_out, at=1 - at, salt=salt)


@pytest.mark.parametrize(("node", "field"), [("a", "sent"), ("c", "received")])
def test_nobody_gets_past_an_audit_by_naming_nothing(node: str, field: str) -> None:
    world = evaluating(*SQUARE, planner=squares)
    for each in "abcd":
        world.vote(each, **({field: said_otherwise(world, each, field, None)} if each == node else {}))
    assert quarantined(world) == [(node, Charge.HOP, False)]
    assert losses(world) == []


@pytest.mark.parametrize(("node", "field"), [("a", "sent"), ("c", "received")])
def test_two_ends_that_differ_about_an_evaluation_are_kept_apart_as_others_are(node: str, field: str) -> None:
    world = evaluating(*SQUARE, planner=squares)
    for each in "abcd":
        world.vote(each, **({field: said_otherwise(world, each, field, "x")} if each == node else {}))
    assert world.events(ev.NodeQuarantined) == []
    assert world.state.ledger.reach.broken == {("a", "c")}
    assert "EVALUATION 0" in world.events(ev.StepAborted)[0].reason


def test_a_vote_on_a_step_that_no_evaluation_came_before_names_none() -> None:
    world = auditing(*SQUARE, planner=squares)
    mine = [hop for hop in hops(world.plan_in_force, HELD_OUT) if hop[0] == "a"]
    stream = world.streams["a"]
    world.vote("a", sent=passed(mine, at=1))
    assert refusal_of(world, stream).reason == wire.MALFORMED


def test_who_reports_its_loss_once_all_have_voted_comes_too_late() -> None:
    """It waits until audits of the step are asked, so that it knows what is drawn."""
    world = auditing("a", "b", "c", rate=1.0, train={"steps": 500, "evaluate_every": 1})
    all_vote(world)
    all_find_it_right(world)
    world.evaluate("a", "b")
    all_vote(world)
    assert not orders(world)
    world.hear("c", evaluated(1, 1, [1.0]))
    all_find_it_right(world)
    assert world.state.ledger.training.step == 2
    assert losses(world) == []
    assert not quarantined(world)


def test_nobody_reports_another_loss_later() -> None:
    world = evaluating("a", "b", "c")
    world.evaluate("a", loss=1.0)
    all_vote(world)
    world.evaluate("b", loss=1.0)
    all_find_it_right(world)
    assert losses(world) == [(1, 2.0)]


def test_an_evaluation_is_lost_if_the_step_that_would_audit_it_is_interrupted() -> None:
    world = evaluating("a", "b", "c")
    assert world.state.evaluations[1].is_whole
    world.fail_step("a", wire.INTERNAL)
    world.settle()
    all_vote(world)
    assert world.state.ledger.training.step == 2
    assert losses(world) == []
    assert not world.events(ev.WorkAudited)


def test_an_open_audit_of_an_evaluation_keeps_a_node_that_leaves_from_nothing_else() -> None:
    """Its training is not audited for that: with the step the evaluation is lost."""
    world = evaluating("a", "b", "c")
    all_vote(world)
    (accused,) = asked(world)
    world.lose(accused)
    assert not world.state.auditing.due
    assert losses(world) == []


def test_what_is_right_of_an_evaluation_clears_nobody_of_what_it_trains() -> None:
    world = World(
        open_run(3, **{**LONG, "train": {"steps": 500, "evaluate_every": 1}}, trust={"audit_rate": NEXT_TO_NOTHING}),
        replicas,
    )
    come(world, "a", "b", "c")
    world.settle()
    for _ in range(PROVEN_AFTER + 3):
        world.step()
        world.evaluate()
    assert len(world.events(ev.WorkAudited)) >= PROVEN_AFTER
    assert {earned(world.state.ledger, node).standing for node in "abc"} == {Standing.NEW}
    assert world.state.ledger.trust.audits == {}
    assert world.state.ledger.trust.rounding == {}, "nor does it teach anything"


def test_what_is_right_of_an_evaluation_takes_no_strike_away_and_ends_no_due_audit() -> None:
    world = evaluating(*SQUARE, planner=squares)
    all_vote(world)
    found = orders(world)
    assert len(found) == 2, "one of each stage"
    strikes = {(by, of): Record((Strike(1, 1, by, ("x",)),), since=5) for by in "abcd" for of in "abcd"}
    before = replace(world.state.auditing, withheld=strikes, due=dict.fromkeys("abcd", 0))
    world.state = replace(world.state, auditing=before)
    all_answer(world, "nobody")
    assert world.state.ledger.training.step == 2
    assert world.state.auditing.withheld == strikes
    assert world.state.auditing.due == before.due


def test_who_withholds_what_it_sent_in_an_evaluation_has_a_strike_and_the_loss_does_not_count() -> None:
    world = evaluating("a", "b", "c", "d", "e", "f", planner=squares, rate=1.0)
    all_vote(world)
    all_answer(world, "a", withheld_by="a", problem="gone", evaluations=-1.0)
    aborted = world.events(ev.StepAborted)[-1]
    assert (aborted.problem, aborted.node) == ("UNAUDITED", "a")
    assert "in the evaluation after step 1 it withheld" in aborted.reason
    assert world.state.auditing.withheld.keys() == {("a", "a")}
    assert losses(world) == []


def test_who_says_that_it_kept_nothing_is_audited_all_the_same_and_those_after_it_are_not() -> None:
    world = evaluating(*SQUARE, planner=squares, rate=1.0)
    for node in "abcd":
        world.vote(node, **({"kept_evaluation": False} if node == "a" else {}))
    found = {node: [each.number for each in order.micro_batches] for node, order in orders(world).items()}
    assert found == {"a": [0, 2], "b": [1, 3], "d": [1, 3]}, "c got its inputs from a"


def test_errors_are_held_against_those_of_what_is_computed_in_the_same_way() -> None:
    world = auditing(*SQUARE, planner=squares, network={"activations": "i4b64"})
    kinds = device_kinds(world.state, "a", "b")
    sorts = {sort_of("activations", "i4b64", kinds): 1e-2, sort_of("losses", "off", kinds): 1e-9}
    rounding = {sort: tuple(Seen(by, "x", 9, apart) for by in "xyz") for sort, apart in sorts.items()}
    world.state = replace(world.state, ledger=altered(world.state.ledger, rounding=rounding))
    first, last = wire.Audit.MicroBatch(number=0, next="c"), wire.Audit.MicroBatch(number=0, previous="a")
    for each, node, by, as_what in ((first, "a", "b", "activations"), (last, "c", "d", "losses")):
        training = limits(world.state, wire.Audit(node=node, micro_batches=[each]), by)
        evaluation = limits(world.state, wire.Audit(node=node, evaluation=True, micro_batches=[each]), by)
        assert evaluation == {"evaluations": training[as_what]}
        assert evaluation["evaluations"].learned


def test_a_stage_that_one_party_holds_is_not_audited() -> None:
    world = auditing(*SQUARE, planner=squares, rate=NEXT_TO_NOTHING, train={"steps": 500, "evaluate_every": 1})
    world.belong_together("a", "b")
    all_vote(world)
    world.evaluate()
    all_vote(world)
    assert not orders(world).keys() & {"a", "b"}
    all_answer(world, "nobody")
    assert losses(world) == [(1, 2.0)]


@pytest.mark.parametrize(
    ("rate", "samples"), [(0.0, 8), (1.0, 2 * (MOST_HELD_OUT_AUDITED + 1))], ids=["not audited", "too long"]
)
def test_what_is_not_audited_counts_at_once(rate: float, samples: int) -> None:
    world = auditing("a", "b", rate=rate, train={"steps": 500, "evaluate_every": 1, "evaluation_samples": samples})
    all_vote(world)
    all_find_it_right(world)
    world.evaluate()
    assert losses(world) == [(1, 2.0)]
    all_vote(world)
    assert not [audit for audit in world.events(ev.WorkAudited) if audit.why == "evaluation"]


def after_the_last_step(*nodes: str, planner: Any = replicas) -> World:
    """A world in which all steps are trained, and the loss after the last one is reported."""
    world = auditing(*nodes, planner=planner, rate=NEXT_TO_NOTHING, train={"steps": 1}, checkpoint={"every": 0})
    all_vote(world)
    assert world.state.ledger.training.step == 1
    world.evaluate()
    return world


def test_after_the_last_step_the_evaluation_alone_is_voted_on() -> None:
    world = after_the_last_step("a", "b", "c")
    last = world.last_to("a", "commit")
    assert (last.step, last.evaluate, last.only_evaluation, last.pause) == (1, True, True, False)
    assert last.snapshot == wire.CHECKPOINT, "which waits for nothing"
    all_vote(world)
    assert world.state.phase.commit_by == world.now, "no standby is waited for"  # type: ignore[union-attr]
    assert losses(world) == []
    all_answer_of_the_last(world)
    assert losses(world) == [(1, 2.0)]
    assert isinstance(world.state.phase, Pausing)
    ending = world.last_to("a", "commit")
    assert (ending.step, ending.evaluate, ending.only_evaluation, ending.pause) == (1, False, False, True)
    assert ending.snapshot == wire.NO_SNAPSHOT
    world.apply()
    world.save()
    assert world.exit_code == 0
    assert [event.step for event in world.events(ev.StepCommitted)] == [1]
    assert not world.events(ev.StepAborted)


def all_answer_of_the_last(world: World, of: str = "", **about_it: Any) -> None:
    while isinstance(world.state.phase, Stepping) and any(asked(world).values()):
        by = min(node for nodes in asked(world).values() for node in nodes)
        world.audit(by, **(about_it if world.last_to(by, "audit").node == of else {}))


def test_who_lies_about_the_last_loss_goes_and_the_others_evaluate_again() -> None:
    world = after_the_last_step("a", "b", "c")
    all_vote(world)
    (accused,) = asked(world)
    all_answer_of_the_last(world, accused, evaluations=0.5)
    assert quarantined(world) == [(accused, Charge.AUDIT, False)]
    world.settle()
    world.evaluate(loss=3.0)
    all_vote(world)
    all_answer_of_the_last(world)
    assert losses(world) == [(1, 3.0)]
    world.apply()
    world.save()
    assert world.exit_code == 0


def its_auditor_finds_it_withheld(world: World) -> None:
    all_vote(world)
    (accused,) = asked(world)
    all_answer_of_the_last(world, accused, withheld_by=accused, problem="gone", evaluations=-1.0)


@pytest.mark.parametrize(
    "interrupt",
    [
        lambda world: world.fail_step("a", wire.INTERNAL, step=2),
        lambda world: world.fail_step("a", wire.PEER_LOST, peer="b", step=2),
        lambda world: world.wait(200 * LEASE, beating="abc"),
        its_auditor_finds_it_withheld,
    ],
    ids=["failed", "lost a peer", "silent", "withheld"],
)
def test_whatever_interrupts_the_last_evaluation_the_run_ends_without_it(interrupt: Callable[[World], None]) -> None:
    world = after_the_last_step("a", "b", "c")
    world.save()
    interrupt(world)
    assert isinstance(world.state.phase, Pausing)
    assert world.kinds_to("a")[-2:] == ["abort", "commit"], "it is to stop waiting for others' tensors"
    world.apply()
    assert world.exit_code == 0
    assert losses(world) == []
    assert not world.events(ev.StepAborted)


@pytest.mark.parametrize("voted", [False, True])
def test_a_death_in_the_last_evaluation_is_harmless_once_the_checkpoint_is_written(voted: bool) -> None:
    world = after_the_last_step("a", "b", "c")
    world.write_checkpoint()
    if voted:
        all_vote(world)
    world.lose("b")
    for node in "ac":
        world.hear(node, applied=wire.Applied(generation=1, step=1, state_digest=DIGEST))
    world.feed(t.ManifestDone(1, ""))
    assert world.exit_code == 0
    assert losses(world) == []


def test_a_death_before_the_checkpoint_is_written_makes_the_others_do_both_again() -> None:
    world = after_the_last_step("a", "b", "c")
    world.lose("b")
    world.settle()
    world.evaluate()
    all_vote(world)
    all_answer_of_the_last(world)
    assert losses(world) == [(1, 2.0)]
    world.apply()
    world.save()
    assert world.exit_code == 0


def test_a_vote_on_the_last_evaluation_has_nothing_of_a_step() -> None:
    world = after_the_last_step("a", "b", "c")
    world.vote("a", samples=2)
    assert quarantined(world) == [("a", Charge.SAMPLE_COUNT, False)]
    for planner, kind in ((replicas, Kind.REDUCE), (squares, Kind.ACTIVATION)):
        world = after_the_last_step(*SQUARE, planner=planner)
        mine = [hop for hop in hops(world.plan_in_force) if (hop[0], hop[2]) == ("a", kind)]
        stream = world.streams["a"]
        world.vote("a", sent=passed(mine, at=1))
        assert refusal_of(world, stream).reason == wire.MALFORMED


def test_where_one_party_holds_each_stage_the_last_loss_counts_at_once() -> None:
    world = auditing(*SQUARE, planner=squares, rate=NEXT_TO_NOTHING, train={"steps": 1})
    world.belong_together("a", "b", key="one")
    world.belong_together("c", "d", key="another")
    all_vote(world)
    assert isinstance(world.state.phase, Pausing)
    world.evaluate()
    assert losses(world) == [(1, 2.0)]
