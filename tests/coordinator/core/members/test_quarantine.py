"""Expelling and forgiving, and what a quarantine binds: `core/members/quarantine.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.view.members import OF_MEMBERS, member_documents
from dtfm.protos import control_pb2 as wire
from tests.coordinator.doors import ID, Door
from tests.coordinator.script import LONG, World, refusal_of, restarted, training


def test_training_goes_on_without_an_expelled_node() -> None:
    world = training("a", "b", "c", **LONG)
    operator = Door(world)
    world.step()
    assert operator.expel("b") == "b is quarantined; training goes on without it, until it is forgiven"
    why = world.events(ev.NodeQuarantined)[-1]
    assert (why.node, why.charge, why.step) == ("b", Charge.OPERATOR, 1)
    assert why.reason == "operator expelled it: it was slow on purpose"
    assert refusal_of(world, world.streams["b"]).reason == wire.QUARANTINED
    world.settle()
    world.step()
    assert world.state.ledger.training.step == 2
    assert world.donors_to("c") == [["a"], ["a"], ["c"], ["c"]]


def test_an_expelled_node_cannot_come_back_until_it_is_forgiven() -> None:
    world = training("a", "b", "c", **LONG)
    operator = Door(world)
    operator.expel("b")
    refused = len(world.events(ev.NodeRefused))
    for _ in range(3):
        assert refusal_of(world, world.greet("b", incarnation=2)).reason == wire.QUARANTINED
    assert len(world.events(ev.NodeRefused)) == refused, "it cannot fill the log"
    assert operator.forgive("b").startswith("b may come back")
    world.join("b", incarnation=2)
    assert "b" in world.state.ledger.ready
    assert operator.expel("b").startswith("b is quarantined;")


def test_peers_are_told_the_quarantined_names_whenever_they_change() -> None:
    world = training("a", "b", "c", "d", **LONG)
    world.belong_together("b", "b-2")
    operator = Door(world)
    operator.expel("b")
    for node in "acd":
        assert list(world.last_to(node, "quarantined").names) == ["b", "b-2"]
    world.settle()
    world.vote("d", samples=7)
    assert list(world.last_to("a", "quarantined").names) == ["b", "b-2", "d"]
    world.join("e")
    assert list(world.last_to("e", "welcome").quarantined) == ["b", "b-2", "d"]
    operator.forgive("b-2")
    assert list(world.last_to("a", "quarantined").names) == ["d"]
    told = world.kinds_to("a").count("quarantined")
    world.lose("e")
    assert world.kinds_to("a").count("quarantined") == told == 3
    after = restarted(world, **LONG)
    after.greet("a")
    assert list(after.last_to("a", "welcome").quarantined) == ["d"]


def test_a_quarantine_outlives_the_coordinator() -> None:
    world = training("a", "b", "c", **LONG)
    Door(world).expel("b")
    after = restarted(world, **LONG)
    after.join("a", "c")
    assert refusal_of(after, after.greet("b")).reason == wire.QUARANTINED


def test_all_names_of_the_key_are_bound() -> None:
    world = training("a", "b", "c", "d", **LONG)
    operator = Door(world)
    world.belong_together("b", "c")
    assert operator.expel("b") == (
        "b is quarantined, with c of the same key; training goes on without it, until it is forgiven"
    )
    refusal = refusal_of(world, world.streams["c"])
    assert "b is quarantined since step 0, and c has its key: OPERATOR" in refusal.sentence
    assert set(world.state.members.sessions) == {"a", "d"}
    assert operator.forgive("c").startswith("b may come back")
    world.join("c", incarnation=2)


def test_where_one_key_has_all_nodes_a_name_alone_is_bound() -> None:
    world = training("a", "b", "c", **LONG)
    world.belong_together("a", "b", "c")
    Door(world).expel("b")
    assert set(world.state.members.sessions) == {"a", "c"}


def test_a_quarantined_key_gets_no_other_name() -> None:
    world = World()
    operator = Door(world)
    operator.invite(uses=10)
    for name in "ab":
        assert operator.enrol(name) is None
        world.join(name)
    operator.expel("a")
    assert operator.enrol("a-2", key="a") == wire.QUARANTINED
    assert operator.enrol("c", invitation=ID) is None


def test_what_it_had_in_memory_is_not_waited_for() -> None:
    world = training("a", "b", **LONG)
    world.step()
    Door(world).expel("b")
    assert isinstance(world.state.phase, Gathering)
    assert "to return" not in world.events(ev.Waiting)[-1].reason
    assert all("b" not in layer for layer in world.state.ledger.holders)


@pytest.mark.parametrize(
    ("node", "complaint"), [("x", "there is no node 'x'"), ("operator", "there is no node 'operator'")]
)
def test_who_is_no_node_cannot_be_expelled(node: str, complaint: str) -> None:
    operator = Door(training())
    assert complaint in operator.expel(node)
    assert "'x' is not quarantined; those who are: nobody" in operator.forgive("x")


def test_only_operators_expel_and_forgive() -> None:
    world = training()
    operator = Door(world)
    operator.enrolled("viewer", "viewer")
    assert "this is for the role operator" in operator.expel("a", by="viewer")
    assert "this is for the role operator" in operator.forgive("a", by="viewer")
    assert world.events(ev.NodeQuarantined) == []


def test_members_shows_quarantined_nodes_and_the_reason() -> None:
    world = training("a", "b", "c", **LONG)
    world.step()
    Door(world).expel("b")
    documents = {document["node"]: document for document in member_documents(world.view)}
    assert (documents["a"]["steps"], documents["a"]["quarantine"]) == (1, None)
    assert documents["b"] == {
        "node": "b",
        "status": "quarantined",
        "steps": 1,
        "standing": {
            "word": "quarantined",
            "reason": "OPERATOR in step 1: operator expelled it: it was slow on purpose",
            "audits": 0,
        },
        "quarantine": {
            "charge": "OPERATOR",
            "reason": "operator expelled it: it was slow on purpose",
            "step": 1,
            "undecided": False,
        },
        **dict.fromkeys(OF_MEMBERS),
    }
