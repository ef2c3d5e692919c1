"""What a neighbour finds unusual is done again before the commit, and costs who raises it little and who is innocent nothing."""

from __future__ import annotations

from typing import Any

from dtfm.coordinator.core.trust.alarms import BURST
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.standing import PROVEN_AFTER, earned
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from tests.coordinator.audit_scripts import (
    all_find_it_right,
    asked,
    auditing,
    auditor_of,
    quarantined,
    replicas,
    squares,
)
from tests.coordinator.honest_work import digest, hops, passed
from tests.coordinator.script import LAYERS, LONG, World
from tests.coordinator.strangers import come, open_run


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
