"""Work of a step is done again before its commit, and who is wrong goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtfm.coordinator.core.auditing.judgement import MOST_REFEREES, referees
from dtfm.coordinator.core.state import Stepping
from dtfm.coordinator.core.trust.alarms import BURST
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.fold import fold
from dtfm.coordinator.log.ledger import Audits
from dtfm.coordinator.log.standing import PROVEN_AFTER, Standing, earned
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.audits import audited, digest, hops, passed
from tests.coordinator.script import LAYERS, LEASE, LONG, World, fresh_state, refusal_of, restarted
from tests.coordinator.strangers import come, open_run


def replicas(nodes: Iterable[str]) -> Plan:
    """One stage, the four micro-batches dealt out."""
    names = sorted(nodes)
    ways = [(names[number % len(names)],) for number in range(4)]
    stage = Stage((0, LAYERS), tuple(names), ())
    return from_routes(0, [stage], [(way, ways.count(way)) for way in dict.fromkeys(ways)])


def squares(nodes: Iterable[str]) -> Plan:
    """Two stages of equal size, the micro-batches dealt out."""
    names = sorted(nodes)
    half = len(names) // 2
    groups = names[:half], names[half : 2 * half]
    stages = [Stage((0, 2), tuple(groups[0]), ()), Stage((2, LAYERS), tuple(groups[1]), ())]
    ways = [(groups[0][number % half], groups[1][number % half]) for number in range(4)]
    return from_routes(0, stages, [(way, ways.count(way)) for way in dict.fromkeys(ways)])


def auditing(*nodes: str, planner: Any = replicas, rate: float = 1.0, **changes: Any) -> World:
    """A world whose nodes compute step 1, with auditors that answer as the test tells them to."""
    tables = {**LONG, **changes, "trust": {"audit_rate": rate}, "cluster": {"nodes": len(nodes)}}
    world = World(fresh_state(**tables), planner)
    world.join(*nodes)
    world.settle()
    world.automatic_audits = False
    return world


def all_vote(world: World, **changes: Any) -> None:
    for node in world.plan_in_force.nodes:
        world.vote(node, **changes)


def asked(world: World) -> dict[str, list[str]]:
    """By node whose work is done again in the step in hand, who is to do it and has not answered."""
    phase = world.state.phase
    return {audit.order.node: sorted(audit.awaited) for audit in phase.audits} if isinstance(phase, Stepping) else {}


def all_find_it_right(world: World) -> None:
    while any(by for by in asked(world).values()):
        for by in [node for nodes in asked(world).values() for node in nodes]:
            if "audit" in world.kinds_to(by):
                world.audit(by)


def quarantined(world: World) -> list[tuple[str, Charge, bool]]:
    return [(event.node, event.charge, event.undecided) for event in world.events(ev.NodeQuarantined)]


def auditor_of(world: World, node: str) -> str:
    (by,) = asked(world)[node]
    return by


def test_the_commit_waits_until_all_audits_are_answered() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    assert world.state.ledger.step == 0
    assert asked(world).keys() == {"a", "b", "c"}
    for number, by in enumerate(sorted(node for nodes in asked(world).values() for node in nodes), 1):
        assert world.state.ledger.step == 0
        world.audit(by)
        assert len(world.events(ev.WorkAudited)) == number
    assert world.state.ledger.step == 1
    assert {event.node for event in world.events(ev.WorkAudited) if event.clean} == {"a", "b", "c"}
    assert all(world.state.ledger.audits[node].clean == 1 for node in "abc")
    assert not quarantined(world)
    assert world.refolded() == world.state.ledger


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
        world = World(open_run(3, **LONG, trust={"audit_rate": 1.0}), replicas)
        come(world, "a", "b", "c")
        world.settle()
        world.automatic_audits = False
        world.vote("a", **of_a)
        world.vote("b")
        world.vote("c", **of_c)
        phase = world.state.phase
        assert isinstance(phase, Stepping)
        (order,) = [audit.order for audit in phase.audits if audit.order.node == "a"]
        assert order.pieces
        assert len(order.sums) == sums


def test_who_withholds_its_own_work_is_not_cleared_by_what_it_hands_out_for_others() -> None:
    world = auditing("a", "b", "c")
    answer_all(world, withheld_by="a", problem="gone")
    assert world.state.auditing.withheld.keys() == {("a", "a")}
    before = world.state.auditing.withheld
    world.settle()
    all_vote(world)
    for accused in "bc":
        world.audit(auditor_of(world, accused))
    assert world.state.auditing.withheld == before


def test_who_sent_an_addend_may_be_said_to_withhold_it() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    by = auditor_of(world, "a")
    (other,) = {"b", "c"} - {by}
    world.audit(by, withheld_by=other, problem="it is gone")
    assert not world.state.auditing.withheld, "another is asked first"
    while asked(world).get("a") != [other] or world.last_to(other, "audit").node != "a":
        world.audit(other)
    world.audit(other)
    assert world.state.auditing.withheld.keys() == {(other, "a")}, "its own word clears nobody"


def test_what_was_added_under_a_sparse_codec_is_not_compared() -> None:
    world = auditing("a", "b", network={"reduction": "topk"})
    all_vote(world)
    assert world.last_to("a", "audit").micro_batches
    assert not world.last_to("a", "audit").HasField("bucket")


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


def test_at_rate_nought_votes_are_taken_as_ever() -> None:
    world = auditing("a", "b", rate=0.0)
    world.step()
    assert world.state.ledger.step == 1


def test_of_strangers_five_times_as_much_is_done_again_until_they_are_proven() -> None:
    world = World(open_run(3, **LONG, trust={"audit_rate": 0.2}), replicas)
    come(world, "a", "b", "c")
    world.settle()
    for _ in range(PROVEN_AFTER):
        world.step()
    assert len(world.events(ev.WorkAudited)) == 3 * PROVEN_AFTER, "five times 0.2 is all"
    assert {earned(world.state.ledger, node).standing for node in "abc"} == {Standing.PROVEN}
    for _ in range(20):
        world.step()
    assert len(world.events(ev.WorkAudited)) < 3 * PROVEN_AFTER + 3 * 20 / 2


def watching(*nodes: str, planner: Any = replicas, rate: float = 1e-9) -> World:
    """Strangers, in a run in which next to nothing is drawn."""
    world = World(open_run(len(nodes), **LONG, trust={"audit_rate": rate}), planner)
    come(world, *nodes)
    world.settle()
    world.automatic_audits = False
    return world


def unlike(node: str, kind: Kind, index: int) -> list[wire.StepReady.Unusual]:
    return [wire.StepReady.Unusual(node=node, kind=kind, index=index, deviations=20.0)]


def test_what_a_neighbour_finds_unusual_is_done_again_before_the_commit() -> None:
    world = watching("a", "b", "c", "d", "e", "f", planner=squares)
    for node in world.plan_in_force.nodes:
        world.vote(node, **({"unusual": unlike("a", Kind.ACTIVATION, 0)} if node == "d" else {}))
    assert world.state.ledger.step == 0
    assert asked(world).keys() == {"a"}
    by = auditor_of(world, "a")
    order = world.last_to(by, "audit")
    assert [each.number for each in order.micro_batches] == [0]
    assert not order.HasField("bucket")
    world.audit(by)
    assert world.state.ledger.step == 1
    (found,) = world.events(ev.WorkAudited)
    assert (found.why, found.raised_by, found.clean) == ("unusual", "d", True)


def test_for_an_addend_that_is_unusual_the_whole_share_is_done_again_with_that_bucket() -> None:
    for bucket in range(LAYERS):
        world = watching("a", "b", "c")
        for node in "abc":
            world.vote(node, **({"unusual": unlike("b", Kind.REDUCE, bucket)} if node == "a" else {}))
        order = world.last_to("c", "audit")
        assert (order.node, order.bucket, [each.number for each in order.micro_batches]) == ("b", bucket, [1])


def test_who_lies_and_is_noticed_goes_in_the_same_step() -> None:
    world = watching("a", "b", "c")
    for node in "abc":
        world.vote(node, **({"unusual": unlike("b", Kind.REDUCE, 1)} if node == "a" else {}))
    world.audit("c", addends=2.0)
    world.audit("a", addends=2.0)
    assert [(event.node, event.charge) for event in world.events(ev.NodeQuarantined)] == [("b", Charge.AUDIT)]
    assert world.state.ledger.step == 0


def test_nobody_is_proven_by_audits_that_its_friends_call_for() -> None:
    world = watching("a", "b", "c")
    for _ in range(PROVEN_AFTER):
        for node in "abc":
            world.vote(node, **({"unusual": unlike("b", Kind.REDUCE, 1)} if node == "a" else {}))
        world.audit("c")
    assert world.state.ledger.step == PROVEN_AFTER
    assert len(world.events(ev.WorkAudited)) == PROVEN_AFTER
    assert earned(world.state.ledger, "b") == earned(world.state.ledger, "c"), "as new as who was never audited"


def test_alarms_use_up_the_allowance_and_not_the_standing_of_who_raises_them() -> None:
    world = watching("a", "b", "c")
    for _ in range(BURST * 2 + 3):
        for node in "abc":
            world.vote(node, **({"unusual": unlike("c", Kind.REDUCE, 1)} if node == "a" else {}))
        all_find_it_right(world)
    assert len(world.events(ev.WorkAudited)) == BURST * 2, "c has one micro-batch, and a has two"
    assert world.state.ledger.step == BURST * 2 + 3
    assert not quarantined(world)


def test_the_same_bytes_for_two_micro_batches_are_done_again() -> None:
    world = watching("a", "b", "c", "d", planner=squares)
    hop = ("a", "c", Kind.ACTIVATION, 0, 0)
    mine = [each for each in hops(world.plan_in_force) if each[0] == "a"]
    received = [each for each in hops(world.plan_in_force) if each[1] == "c"]
    told = {"a": passed(mine, at=1), "c": passed(received, at=0)}
    for field in (told["a"], told["c"]):
        for each in field:
            if each.kind == Kind.ACTIVATION:
                each.digests = digest(hop) * len(each.indices)
    for node in "abcd":
        fields = {"a": {"sent": told["a"]}, "c": {"received": told["c"]}}.get(node, {})
        world.vote(node, **fields)
    assert asked(world) == {"a": ["b"]}
    assert [each.number for each in world.last_to("b", "audit").micro_batches] == [0, 2]
    world.audit("b")
    assert [(event.why, event.raised_by) for event in world.events(ev.WorkAudited)] == [("unusual", "")]


def test_among_people_who_know_each_other_nothing_is_watched() -> None:
    world = auditing("a", "b", "c", rate=1e-9)
    for node in "abc":
        world.vote(node, **({"unusual": unlike("b", Kind.REDUCE, 1)} if node == "a" else {}))
    assert world.state.ledger.step == 1
    assert not world.events(ev.WorkAudited)


def test_a_small_difference_is_rounding() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    world.audit(auditor_of(world, "a"), losses=5e-4, addends=9e-4)
    assert world.events(ev.WorkAudited)[0].clean
    assert world.events(ev.WorkAudited)[0].errors == {"losses": 5e-4, "addends": 9e-4}


def test_what_two_others_find_wrong_goes_and_the_step_goes_on_without_it() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    first = auditor_of(world, "a")
    world.audit(first, addends=0.05)
    assert not world.events(ev.WorkAudited), "the third is asked first"
    (second,) = {"b", "c"} - {first}
    while second not in asked(world)["a"]:
        world.audit(second)  # it does one after the other
    assert world.last_to(second, "audit").node == "a"
    world.audit(second, addends=0.03)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]
    assert [(event.node, event.clean) for event in world.events(ev.WorkAudited)][-1] == ("a", False)
    assert world.events(ev.StepAborted)[-1].problem == "SETTLED"
    assert "a" not in world.state.ledger.members
    assert world.plan_in_force.nodes == ("b", "c")


def test_who_says_that_right_work_is_wrong_goes_itself() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    liar = auditor_of(world, "a")
    (third,) = {"b", "c"} - {liar}
    world.audit(liar, addends=2.0)
    while third not in asked(world)["a"]:
        world.audit(third)
    world.audit(third)
    assert quarantined(world) == [(liar, Charge.AUDIT, False)]
    assert [event.clean for event in world.events(ev.WorkAudited) if event.node == "a"] == [True]
    assert "a" in world.plan_in_force.nodes


def test_who_lies_by_just_as_much_as_one_auditor_finds_sets_no_two_against_each_other() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    first = auditor_of(world, "a")
    (second,) = {"b", "c"} - {first}
    world.audit(first, addends=1.01e-3)
    while second not in asked(world)["a"]:
        world.audit(second)
    world.audit(second, addends=0.99e-3)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]


def test_between_two_it_is_undecided_and_the_one_of_less_standing_goes() -> None:
    world = auditing("a", "b")
    all_vote(world)
    world.audit("b", losses=1.0)
    assert quarantined(world) == [("b", Charge.AUDIT, True)], "who came last"
    assert not [event for event in world.events(ev.WorkAudited) if event.node == "a"]
    assert not world.events(ev.RolledBack)


def test_nobody_audits_its_own_party() -> None:
    world = World(fresh_state(**LONG, trust={"audit_rate": 1.0}, cluster={"nodes": 4}), squares)
    world.belong_together("a", "b")
    world.join("a", "b", "c", "d")
    world.settle()
    world.automatic_audits = False
    all_vote(world)
    assert asked(world) == {"c": ["d"], "d": ["c"]}


def test_an_audit_without_an_answer_counts_for_nothing_and_the_third_in_a_row_suspends_the_auditor() -> None:
    world = auditing("a", "b", "c")
    for step in range(1, 4):
        all_vote(world)
        assert world.state.ledger.step == step - 1
        while (world.state.ledger.step < step) and not quarantined(world):
            for by in [node for nodes in asked(world).values() for node in nodes]:
                if by != "c":
                    world.audit(by)
            if world.state.ledger.step < step and not quarantined(world):
                world.wait(world.state.wakes_at - world.now + 0.1, beating="abc")  # type: ignore[operator]
    assert quarantined(world) == [("c", Charge.WITHHELD, True)]
    assert all(event.clean for event in world.events(ev.WorkAudited))


def test_the_answer_is_awaited_no_longer_than_a_few_steps_take() -> None:
    world = auditing("a", "b", "c")
    for _ in range(3):
        all_vote(world)
        all_find_it_right(world)
    all_vote(world)
    assert world.state.wakes_at == pytest.approx(world.now + 6 * LEASE, rel=1e-3)


def test_who_withholds_what_audits_need_goes_once_two_others_have_said_so_three_times() -> None:
    world = auditing("a", "b", "c")
    for _ in range(3):
        assert not quarantined(world)
        world.settle()
        answer_all(world, withheld_by="a")
    assert quarantined(world) == [("a", Charge.WITHHELD, True)]
    assert world.events(ev.NodeQuarantined)[0].against == ("b", "c")
    assert world.state.ledger.step == 0, "nothing of it counted"
    assert not [event for event in world.events(ev.WorkAudited) if event.node == "a"]


def test_between_two_who_withholds_its_own_work_is_weighed_against_who_says_so() -> None:
    world = auditing("a", "b")
    for _ in range(2):
        answer_all(world)
    for _ in range(3):
        assert not quarantined(world)
        world.settle()
        answer_all(world, withheld_by="a")
    assert quarantined(world) == [("b", Charge.WITHHELD, True)], "who came last"


@pytest.mark.parametrize("changes", [{"problem": "no memory"}, {"losses": -1.0}])
def test_what_could_not_be_compared_counts_neither_way(changes: dict[str, Any]) -> None:
    world = auditing("a", "b", "c")
    answer_all(world, **changes)
    assert world.state.ledger.step == 1
    assert {event.node for event in world.events(ev.WorkAudited)} == {"b", "c"}


def test_an_answer_counts_only_from_whom_it_is_due_and_once() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    by = auditor_of(world, "a")
    order = world.last_to(by, "audit")
    (other,) = {"b", "c"} - {by}
    world.hear(other, audited(order, addends=2.0))
    world.hear("a", audited(order))
    world.audit(by, number=order.number + 100)
    assert asked(world)["a"] == [by]
    world.audit(by)
    world.hear(by, audited(order, addends=2.0))
    all_find_it_right(world)
    world.hear(by, audited(order, addends=2.0))
    assert world.state.ledger.step == 1
    assert not quarantined(world)


@pytest.mark.parametrize("changes", [{"losses": float("nan")}, {"addends": -0.5}, {"withheld_by": "z"}])
def test_an_answer_that_nobody_can_mean_is_refused(changes: dict[str, Any]) -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    by = auditor_of(world, "a")
    world.audit(by, **changes)
    assert refusal_of(world, world.streams[by]).reason == wire.MALFORMED


def test_a_difference_at_the_two_ends_of_a_hop_is_settled_against_one_of_the_two() -> None:
    world = auditing("a", "b", "c", "d", planner=squares)
    mine = [hop for hop in hops(world.plan_in_force) if hop[1] == "c"]
    received = passed([hop for hop in mine if hop[:3] != ("a", "c", Kind.ACTIVATION)], at=0)
    received += passed([hop for hop in mine if hop[:3] == ("a", "c", Kind.ACTIVATION)], at=0, salt="another")
    for node in "abd":
        world.vote(node)
    world.vote("c", received=received)
    assert quarantined(world) == [("c", Charge.HOP, True)]
    assert world.events(ev.NodeQuarantined)[0].against == ("a",)
    assert not [kind for node in "abd" for kind in world.kinds_to(node) if kind == "audit"]


@pytest.mark.parametrize("norm", [2.0, 3.0])
def test_who_sends_different_sums_to_its_replicas_goes_and_none_of_these_though_it_differs(norm: float) -> None:
    """Both ends of each hop say the same. If only a sign differs, the norms are equal."""
    world = auditing("a", "b", "c")
    odd = ("c", "b", Kind.GATHER)

    def but_one(node: str, at: int) -> list[wire.StepReady.Passed]:
        mine = [hop for hop in hops(world.plan_in_force) if hop[1 - at] == node]
        honest = passed([hop for hop in mine if hop[:3] != odd], at=at)
        return honest + passed([hop for hop in mine if hop[:3] == odd], at=at, salt="another")

    world.vote("a")
    world.vote("b", received=but_one("b", at=0), squared_gradient_norm=norm)
    world.vote("c", sent=but_one("c", at=1))
    assert quarantined(world) == [("c", Charge.HOP, False)]
    assert world.plan_in_force.nodes == ("a", "b")


def test_who_contradicts_several_is_the_one() -> None:
    """The first to come has the best standing."""
    world = auditing("a", "b", "c")
    world.vote("a", sent=passed([hop for hop in hops(world.plan_in_force) if hop[0] == "a"], at=1, salt="another"))
    world.vote("b")
    world.vote("c")
    assert quarantined(world) == [("a", Charge.HOP, True)]
    assert world.events(ev.NodeQuarantined)[0].against == ("b", "c")


@pytest.mark.parametrize(
    "changes", [{"sent": [], "received": []}, {"losses": []}, {"losses": [0.1] * 2}, {"sent": [], "kept": False}]
)
def test_who_says_nothing_of_what_the_plan_has_or_another_loss_is_at_fault_alone(changes: dict[str, Any]) -> None:
    world = auditing("a", "b", "c", "d", planner=squares)
    for node in "abd":
        world.vote(node)
    world.vote("c", **changes)
    assert quarantined(world) == [("c", Charge.HOP, False)]


def test_votes_of_a_step_that_was_resumed_may_say_nothing_and_it_is_not_audited() -> None:
    world = auditing("a", "b", "c")
    all_find_it_right_in_one_step(world)
    world.join("d")
    world.lose("c")
    world.plan_ready("a", progress=wire.Progress(finished=[0]))
    for node in world.plan_in_force.nodes:
        world.plan_ready(node)
    before = world.state.ledger.step
    all_vote(world, sent=[], received=[], losses=[])
    assert world.state.ledger.step == before + 1


def all_find_it_right_in_one_step(world: World) -> None:
    all_vote(world)
    all_find_it_right(world)


def test_a_node_that_leaves_while_it_is_audited_takes_its_work_with_it() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    world.lose("a")
    assert world.state.ledger.step == 0
    assert world.events(ev.StepAborted)[-1].problem == "UNAUDITED"
    assert world.state.ledger.counts_from == world.state.ledger.generation


def test_an_auditor_that_leaves_is_no_way_round_an_audit() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    world.lose(auditor_of(world, "a"))
    assert world.state.ledger.step == 0
    world.settle()
    all_vote(world)
    assert "a" in asked(world)
    assert not quarantined(world)


def test_a_restart_forgets_audits_that_wait() -> None:
    world = auditing("a", "b", "c")
    all_vote(world)
    again = restarted(world, **{**LONG, "trust": {"audit_rate": 1.0}, "cluster": {"nodes": 3}})
    again.planner = replicas
    again.join("a", "b", "c")
    assert again.state.ledger.step == 0
    again.settle()
    again.step()
    assert again.state.ledger.step == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.floats(0.01, 1.0), st.binary(min_size=32, max_size=32), st.booleans())
def test_an_honest_run_accuses_nobody_whatever_is_drawn(count: int, rate: float, secret: bytes, several: bool) -> None:
    world = World(
        replace(fresh_state(**LONG, trust={"audit_rate": rate}, cluster={"nodes": count}), secret=secret),
        squares if count in (4, 6) else replicas,
    )
    if several:
        world.belong_together("a", "c")
    world.join(*"abcdef"[:count])
    world.settle()
    for _ in range(12):
        world.step()
    assert world.state.ledger.step == 12
    assert not quarantined(world)
    assert all(event.clean for event in world.events(ev.WorkAudited))


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 4), st.data())
def test_a_single_liar_among_three_parties_or_more_is_found_once_it_is_audited_or_audits(
    count: int, data: st.DataObject
) -> None:
    """Its work is wrong, or it accuses everybody, or both."""
    names = "abcdef"[:count]
    liar, spoils = data.draw(st.sampled_from(names)), data.draw(st.booleans())
    accuses = data.draw(st.booleans()) or not spoils
    world = auditing(*names)
    all_vote(world)
    for _ in range(10):
        if quarantined(world):
            break
        for accused, by in list(asked(world).items()):
            for node in data.draw(st.permutations(by)):
                wrong = accuses if node == liar else accused == liar and spoils
                if isinstance(world.state.phase, Stepping) and node in asked(world).get(accused, ()):
                    world.audit(node, losses=2.0 if wrong else 0.0)
    assert quarantined(world) == [(liar, Charge.AUDIT, False)]


def answer_all(world: World, of: str = "a", **about_it: Any) -> None:
    """All audits of the step in hand are answered: of this node's work as given, of others' that it is right."""
    if not asked(world):
        all_vote(world)
    step = world.state.ledger.step
    while world.state.ledger.step == step and isinstance(world.state.phase, Stepping) and asked(world):
        for accused, by in list(asked(world).items()):
            for node in by:
                if node in asked(world).get(accused, ()):
                    world.audit(node, **(about_it if accused == of else {}))


def with_checkpoints(world: World, steps: int, **about_a: Any) -> None:
    """So many steps, each second one with a checkpoint."""
    for _ in range(steps):
        answer_all(world, **about_a)
        if world.state.ledger.step % 2 == 0:
            world.save()


def test_a_liar_whose_work_was_found_right_in_the_last_committed_step_has_nothing_to_undo() -> None:
    world = auditing("a", "b", "c")
    for _ in range(3):
        answer_all(world)
    answer_all(world, addends=2.0)
    assert quarantined(world) == [("a", Charge.AUDIT, False)]
    assert not world.events(ev.RolledBack)
    assert world.state.ledger.step == 3


def test_what_a_liar_did_since_its_last_clean_audit_is_undone() -> None:
    world = auditing("a", "b", "c", checkpoint={"every": 2, "keep": 3})
    with_checkpoints(world, 3)
    with_checkpoints(world, 3, problem="no memory")
    answer_all(world, addends=2.0)
    (back,) = world.events(ev.RolledBack)
    assert (back.step, back.from_step) == (2, 6), "its last clean audit was of step 3"
    assert "what a did is undone" in back.reason
    assert world.state.ledger.step == 2
    assert world.plan_in_force.nodes == ("b", "c")
    assert world.refolded() == world.state.ledger


def test_who_was_never_audited_is_undone_to_before_it_came() -> None:
    world = auditing("b", "c", "d", checkpoint={"every": 2, "keep": 3})
    with_checkpoints(world, 5)
    world.join("a")
    with_checkpoints(world, 1)
    world.apply()
    world.settle()
    assert world.plan_in_force.nodes == ("a", "b", "c", "d")
    with_checkpoints(world, 2, problem="no memory")
    answer_all(world, addends=2.0)
    assert [(back.step, back.from_step) for back in world.events(ev.RolledBack)] == [(6, 8)]


def test_what_cannot_be_undone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtfm.coordinator.core.auditing.judgement.MOST_UNDONE", 3)
    world = auditing("a", "b", "c")
    for _ in range(5):
        answer_all(world, problem="no memory")
    answer_all(world, addends=2.0)
    assert not world.events(ev.RolledBack)
    assert "what it did since step 0 stays" in world.events(ev.NodeQuarantined)[0].reason
    assert world.state.ledger.step == 5


def test_checkpoints_that_are_deleted_by_now_are_no_way_back() -> None:
    world = auditing("a", "b", "c", checkpoint={"every": 2, "keep": 1})
    with_checkpoints(world, 3)
    with_checkpoints(world, 3, problem="no memory")
    answer_all(world, addends=2.0)
    assert [back.step for back in world.events(ev.RolledBack)] == [0]


@pytest.mark.parametrize(
    ("found", "wrong", "back"),
    [
        (Audits(4, 5, last_of={"a": 5}, last_added={"a": 3}), {"addends": 2.0}, [2]),
        (Audits(4, 5, last_of={"a": 5}, last_added={"a": 3}), {"addends": 2.0, "losses": 2.0}, []),
        (Audits(4, 5, last_of={"a-2": 5}, last_added={"a-2": 5}), {"addends": 2.0}, [0]),
    ],
    ids=["that of a micro-batch says nothing of what it added", "of the same work", "not that of another of its names"],
)
def test_the_last_clean_audit_is_one_that_would_have_seen_it(
    found: Audits, wrong: dict[str, Any], back: list[int]
) -> None:
    world = auditing("a", "b", "c", checkpoint={"every": 2, "keep": 3})
    with_checkpoints(world, 5, problem="no memory")
    world.state = replace(world.state, ledger=replace(world.state.ledger, audits={"a": found}))
    answer_all(world, **wrong)
    assert [each.step for each in world.events(ev.RolledBack)] == back


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
