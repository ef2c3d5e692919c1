"""Revoked access ends immediately and for good, and the other members hear of it: `core/members/invitations.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.phases import Switching
from dtfm.coordinator.log import access, events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.doors import DAY, ID, Door
from tests.coordinator.script import refusal_of, training


def test_a_revoked_invitation_is_no_longer_good_but_nodes_that_came_by_it_stay(door: Door) -> None:
    door.invite(uses=3)
    door.enrol("a")
    assert door.revoke(ID) is None
    assert "who came by it stays (a)" in door.sentence
    assert door.enrol("b") == wire.REVOKED
    assert door.enrol("a") is None


def test_nobody_comes_again_by_the_invitation_of_a_revoked_name(door: Door) -> None:
    door.invite(uses=3)
    door.enrol("a")
    assert door.revoke("a") is None
    assert f"invitation {ID}, by which it came or which it made, is not good any more" in door.sentence
    assert "who came by it stays" not in door.sentence
    assert door.enrol("other") == wire.REVOKED


def test_who_else_came_by_the_invitation_of_a_revoked_name_is_named(door: Door) -> None:
    door.invite(uses=4)
    for name in "abc":
        door.enrol(name)
    door.revoke("a")
    assert "who came by it stays (b, c), unless you revoke them by name" in door.sentence


def test_revoking_a_name_cuts_its_whole_machine_off(door: Door) -> None:
    """What is no longer trusted is the key, whatever name it uses."""
    door.invite(uses=2)
    for name, key in (("a", "a"), ("a-2", "a"), ("b", "b")):
        door.enrol(name, key=key)
        door.world.greet(name)
    assert door.revoke("a-2") is None
    assert "a-2 (node) is cut off, with a on the same machine" in door.sentence
    assert "who came by it stays (b)" in door.sentence
    assert set(door.world.state.members.sessions) == {"b"}
    assert list(door.world.last_to("b", "revoked").names) == ["a", "a-2"]
    assert door.world.kinds_to("b").count("revoked") == 1
    assert door.enrol("a-3", key="a", invitation="", secret=b"") == wire.UNKNOWN_KEY


def test_a_revoked_operator_does_not_come_again_by_invitations_that_it_made(door: Door) -> None:
    made, used_up, others = "111111111111", "222222222222", "333333333333"
    door.invite(role="operator", uses=2)
    door.enrol("eve", roles=["operator"])
    door.invite(made, by="eve", role="operator", uses=2)
    door.invite(used_up, by="eve")
    door.invite(others)
    door.enrol("a", invitation=made, roles=["operator"])
    door.enrol("b", invitation=used_up)
    assert door.revoke("eve") is None
    assert f"{made}, by which it came or which it made, are not good any more" in door.sentence
    assert "who came by them stays (a, b), unless you revoke them by name" in door.sentence
    assert door.world.events(ev.Revoked)[-1].invitations == (ID, made)
    for id in (ID, made):
        assert door.enrol("eve-2", invitation=id, roles=["operator"]) == wire.REVOKED
    assert door.enrol("c", invitation=others) is None


def test_what_a_revoked_operator_has_asked_for_before_is_not_done_after(door: Door) -> None:
    """Its call was let in, and waited while it was revoked."""
    door.enrolled("eve", "operator")
    door.invite(uses=2)
    door.enrol("a")
    door.revoke("eve")
    before = len(door.world.log)
    assert door.invite("ba9876543210", by="eve", role="operator") == wire.REVOKED
    assert door.revoke("operator", by="eve") == wire.REVOKED
    assert door.revoke(ID, by="eve") == wire.REVOKED
    assert "the access of 'eve' was revoked" in door.sentence
    assert door.invite("ba9876543210", by="a") == wire.ROLE
    assert door.revoke("operator", by="a") == wire.ROLE
    assert len(door.world.log) == before


def test_a_revoked_name_is_never_free_again_and_peers_hear_of_it_ever_after(door: Door) -> None:
    """A connection that it opened before may outlive every certificate."""
    door.invite(uses=9, seconds=90 * DAY)
    for name in "ab":
        door.enrol(name)
    door.revoke("a")
    door.now += 30 * DAY
    door.invite("ba9876543210")
    assert door.enrol("a", key="other", invitation="ba9876543210") == wire.NAME_TAKEN
    assert "was revoked, for good; give another with --id NAME" in door.sentence
    assert door.enrol("a", invitation="ba9876543210") == wire.NAME_TAKEN
    door.world.greet("member")
    door.revoke("b")
    assert list(door.world.last_to("member", "revoked").names) == ["a", "b"]


def test_of_very_many_revoked_names_the_oldest_is_forgotten(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MOST_REVOKED", 2)
    for number, name in enumerate("zxya"):
        door.invite(f"{number:012x}")
        door.enrol(name, invitation=f"{number:012x}")
        door.revoke(name)
    assert list(door.world.state.ledger.access.revoked) == ["y", "a"]


def test_what_there_is_not_cannot_be_revoked(door: Door) -> None:
    assert door.revoke("nobody") == wire.MALFORMED
    assert "no invitation and no name 'nobody'" in door.sentence


def test_a_revoked_member_is_cut_off_at_once_and_its_peers_are_told() -> None:
    world = training("a", "b", "c")
    door = Door(world)
    door.invite(uses=3)
    for name in "abc":
        door.enrol(name)
    stream = world.streams["a"]
    door.revoke("a")
    assert refusal_of(world, stream).reason == wire.REVOKED
    assert "a" not in world.state.members.sessions
    assert isinstance(world.state.phase, Switching)
    assert list(world.last_to("b", "revoked").names) == list(world.last_to("c", "revoked").names) == ["a"]
    assert world.events(ev.NodeLeft)[-1].reason == "its access was revoked"


def test_a_member_that_joins_later_learns_the_revoked_names() -> None:
    world = training("a", "b")
    door = Door(world)
    door.invite(uses=3)
    door.enrol("x")
    door.revoke("x")
    world.greet("c")
    assert list(world.last_to("c", "welcome").revoked) == ["x"]


def test_a_call_that_was_made_before_the_revocation_comes_too_late(door: Door) -> None:
    door.invite()
    door.enrol()
    door.revoke("a")
    assert refusal_of(door.world, door.world.greet("a")).reason == wire.REVOKED
    assert not door.world.state.members.sessions
