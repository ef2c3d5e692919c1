"""What two ends of a hop say of it differently is settled without an audit, against who must be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from dtfm.coordinator.core.trust.disputes import kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from tests.coordinator.audit_scripts import auditing, quarantined, squares
from tests.coordinator.honest_work import hops, passed


def test_two_ends_of_a_hop_that_differ_are_kept_apart_and_neither_is_quarantined() -> None:
    world = auditing("a", "b", "c", "d", planner=squares)
    mine = [hop for hop in hops(world.plan_in_force) if hop[1] == "c"]
    received = passed([hop for hop in mine if hop[:3] != ("a", "c", Kind.ACTIVATION)], at=0)
    received += passed([hop for hop in mine if hop[:3] == ("a", "c", Kind.ACTIVATION)], at=0, salt="another")
    for node in "abd":
        world.vote(node)
    world.vote("c", received=received)
    assert quarantined(world) == []
    assert kept_apart(world.state.ledger) == {("a", "c")}
    assert world.events(ev.StepAborted)[0].reason.startswith("in step 1, a and c do not say the same of ACTIVATION")
    assert not [kind for node in "abd" for kind in world.kinds_to(node) if kind == "audit"]


@pytest.mark.parametrize("norm", [2.0, 3.0])
def test_a_node_that_sends_different_sums_to_replicas_goes_and_no_replica_though_they_differ(norm: float) -> None:
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


def test_two_that_agree_against_a_third_do_not_throw_it_out() -> None:
    """They may be one: all three are strangers, and the two name what the third did not send."""
    world = auditing("a", "b", "c", mode="open")
    mine = [hop for hop in hops(world.plan_in_force) if hop[0] == "a"]
    for liar in "bc":
        theirs = [hop for hop in hops(world.plan_in_force) if hop[1] == liar]
        honest = passed([hop for hop in theirs if hop[0] != "a"], at=0)
        world.vote(liar, received=honest + passed([hop for hop in mine if hop[1] == liar], at=0, salt="another"))
    world.vote("a")
    assert quarantined(world) == []
    assert kept_apart(world.state.ledger) == {("a", "b"), ("a", "c")}


def test_whom_three_others_contradict_is_quarantined() -> None:
    world = auditing("a", "b", "c", "d")
    world.vote("a", sent=passed([hop for hop in hops(world.plan_in_force) if hop[0] == "a"], at=1, salt="another"))
    for node in "bcd":
        world.vote(node)
    assert quarantined(world) == [("a", Charge.HOP, True)]
    assert world.events(ev.NodeQuarantined)[0].against == ("b", "c", "d")


@pytest.mark.parametrize(
    "changes", [{"sent": [], "received": []}, {"losses": []}, {"losses": [0.1] * 2}, {"sent": [], "kept": False}]
)
def test_a_node_that_omits_a_tensor_of_the_plan_or_votes_another_loss_is_alone_at_fault(
    changes: dict[str, Any],
) -> None:
    world = auditing("a", "b", "c", "d", planner=squares)
    for node in "abd":
        world.vote(node)
    world.vote("c", **changes)
    assert quarantined(world) == [("c", Charge.HOP, False)]
