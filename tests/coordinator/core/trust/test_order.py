"""The order for an auditor: the work to repeat, its node, and the digests: `core/trust/draw.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.trust.judgement import MOST_REFEREES, referees
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.log.standing import PROVEN_AFTER, Standing, earned
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from tests.coordinator.audit_scripts import all_vote, auditing, auditor_of, replicas, squares
from tests.coordinator.script import LONG
from tests.coordinator.strangers import strangers


def test_an_audit_names_what_the_accused_passed_on_by_digests_that_both_ends_voted() -> None:
    world = auditing("a", "b", "c", "d", planner=squares)
    all_vote(world)
    plan = world.plan_in_force
    told = {hop: digest for node in plan.nodes for hop, digest in world.state.phase.passed[node].sent.items()}  # type: ignore[union-attr]
    first, last = world.last_to("b", "audit"), world.last_to("d", "audit")
    assert (first.node, last.node) == ("a", "c")
    for each in first.micro_batches:
        assert (each.previous, each.next, each.activation_in, each.gradient_out) == ("", "c", b"", b"")
        assert each.activation_out == told["a", "c", Kind.ACTIVATION, each.number, 0]
        assert each.gradient_in == told["c", "a", Kind.GRADIENT, each.number, 0]
    for each in last.micro_batches:
        assert (each.previous, each.next, each.activation_out, each.gradient_in) == ("a", "", b"", b"")
        assert each.activation_in == told["a", "c", Kind.ACTIVATION, each.number, 0]
        assert each.gradient_out == told["c", "a", Kind.GRADIENT, each.number, 0]
        assert each.loss == 0.5
    assert [each.number for each in first.micro_batches] == [0, 2], "its whole share"
    assert first.bucket in (0, 1)
    assert [(p.piece, p.digest) for p in first.pieces] == [(1, told["a", "b", Kind.REDUCE, first.bucket, 1])]
    (summed,) = first.sums
    addends = [(addend.node, addend.digest) for addend in summed.addends]
    assert (summed.piece, addends) == (0, [("b", told["b", "a", Kind.REDUCE, first.bucket, 0])])


def test_a_sum_is_not_done_again_where_its_owner_clipped_or_somebody_no_longer_has_what_it_added() -> None:
    clipped = wire.StepReady.Clipped(node="c", pieces=1, worst=31.0)
    for of_a, of_c, sums in (({}, {}, 1), ({"clipped": [clipped]}, {}, 0), ({}, {"kept": False}, 0)):
        world = strangers("a", "b", "c", planner=replicas, **LONG, trust={"audit_rate": 1.0})
        world.automatic_audits = False
        world.vote("a", **of_a)
        world.vote("b")
        world.vote("c", **of_c)
        phase = world.state.phase
        assert isinstance(phase, Stepping)
        (order,) = [audit.order for audit in phase.audits if audit.order.node == "a"]
        assert order.pieces
        assert len(order.sums) == sums


@pytest.mark.parametrize("codec", ["topk", "zz"])
def test_no_word_of_a_node_on_its_codecs_keeps_what_it_adds_from_being_compared_closely(codec: str) -> None:
    """Not even one that is in the log of a coordinator that took it."""
    world = auditing("a", "b", "c")
    told = ev.CodecsChosen("a", {node: {"reduction": codec} for node in "bc"})
    world.state = replace(world.state, ledger=fold([told], world.state.ledger))
    all_vote(world)
    by = auditor_of(world, "a")
    assert world.last_to(by, "audit").HasField("bucket")
    world.audit(by, addends=2e-3)
    assert not [event for event in world.events(ev.WorkAudited) if event.node == "a"], "a third is asked"


def test_what_a_codec_that_the_run_names_rounds_off_is_no_error() -> None:
    world = auditing("a", "b", "c", network={"reduction": "i4b64"})
    all_vote(world)
    world.audit(auditor_of(world, "a"), addends=0.02)
    assert [event.node for event in world.events(ev.WorkAudited) if event.clean] == ["a"]


def test_of_strangers_five_times_as_much_is_done_again_until_they_are_proven() -> None:
    world = strangers("a", "b", "c", planner=replicas, **LONG, trust={"audit_rate": 0.2})
    for _ in range(PROVEN_AFTER):
        world.step()
    assert len(world.events(ev.WorkAudited)) == 3 * PROVEN_AFTER, "five times 0.2 is all"
    assert {earned(world.state.ledger, node).standing for node in "abc"} == {Standing.PROVEN}
    for _ in range(20):
        world.step()
    assert len(world.events(ev.WorkAudited)) < 3 * PROVEN_AFTER + 3 * 20 / 2


def test_who_is_asked_as_well_is_drawn_whatever_the_names_are() -> None:
    world = auditing(*"abcdefgh")
    all_vote(world)
    phase = world.state.phase
    assert isinstance(phase, Stepping)
    (audit,) = [each for each in phase.audits if each.order.node == "a"]
    found_wrong = replace(audit, answers={audit.auditors[0]: wire.Audited(losses=2.0, addends=2.0)})
    drawn = [referees(replace(world.state, secret=bytes([number]) * 32), found_wrong) for number in range(8)]
    assert len(set(map(frozenset, drawn))) > 1
    assert all(len(set(each) - {"a", audit.auditors[0]}) == MOST_REFEREES for each in drawn)
