"""Invitations: who makes them, what they allow, and how they end: `core/members/invitations.py`."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from dtfm.coordinator.core.members import invitations
from dtfm.coordinator.log import access, events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.credentials import public_key
from tests.coordinator.doors import DAY, ID, SECRET, Door
from tests.protos.members import key_of


def test_who_shows_the_secret_gets_the_name_and_the_role(door: Door) -> None:
    assert door.invite() is None
    assert door.enrol() is None
    holder = door.world.state.ledger.access.names["a"]
    assert (holder.role, holder.invitation) == ("node", ID)
    assert base64.b64decode(holder.key) == public_key(key_of("a"))


def test_the_log_holds_no_secret(door: Door) -> None:
    door.invite()
    door.enrol()
    written = str([ev.to_json(event) for event in door.world.log])
    assert SECRET.hex() not in written
    assert base64.b64encode(SECRET).decode() not in written


def test_a_wrong_secret_or_id_is_refused_and_leaves_no_trace(door: Door) -> None:
    door.invite()
    before = len(door.world.log)
    assert door.enrol(secret=bytes(31) + b"\1") == wire.INVITATION_UNKNOWN
    assert door.enrol(secret=b"") == wire.INVITATION_UNKNOWN
    assert door.enrol(invitation="ffffffffffff") == wire.INVITATION_UNKNOWN
    assert "of another run" in door.sentence
    assert len(door.world.log) == before


def test_an_invitation_expires(door: Door) -> None:
    door.invite(seconds=DAY)
    door.now += DAY - 1
    assert door.enrol("a") is None
    door.invite("ba9876543210", seconds=DAY)
    door.now += DAY
    assert door.enrol("b", invitation="ba9876543210") == wire.INVITATION_EXPIRED
    assert "was good until 2027-01-17 07:59 UTC; ask for a new one" in door.sentence


def test_an_invitation_is_used_up(door: Door) -> None:
    door.invite(uses=2)
    assert [door.enrol(name) for name in "abc"] == [None, None, wire.INVITATION_USED_UP]
    assert "good for 2 times, and is used up" in door.sentence


def test_a_role_is_the_invitations_and_one_that_is_of_no_use_is_not_used_up(door: Door) -> None:
    door.invite(role="viewer")
    assert door.enrol() == wire.ROLE
    assert "the invitation is for a viewer; ask for another (invite --role)" in door.sentence
    assert door.enrol(roles=["operator", "viewer"]) is None
    assert door.enrol() == wire.ROLE


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "king"},
        {"role": ""},
        {"uses": 0},
        {"uses": 1001},
        {"seconds": 0},
        {"seconds": -1},
        {"seconds": float("nan")},
        {"seconds": 367 * DAY},
    ],
)
def test_a_wrong_invitation_is_not_made(door: Door, changes: dict[str, Any]) -> None:
    assert door.invite(**changes) == wire.MALFORMED
    assert not door.world.log


def test_what_is_remembered_is_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (access, invitations):
        monkeypatch.setattr(module, "MOST_INVITATIONS", 3)
    ids = [f"{number:012x}" for number in range(4)]
    assert [door.invite(id, seconds=DAY) for id in ids] == [None, None, None, wire.FULL]
    assert "revoke some" in door.sentence
    door.now += 2 * DAY
    assert door.invite(ids[3]) is None
    assert set(door.world.state.ledger.access.invitations) == {ids[3]}
    monkeypatch.setattr(invitations, "MOST_NAMES", 2)
    door.invite(uses=10)
    assert [door.enrol(name) for name in "ab"] == [None, wire.FULL]


def test_invitations_that_are_no_longer_good_make_room(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (access, invitations):
        monkeypatch.setattr(module, "MOST_INVITATIONS", 3)
    revoked, used_up, good, new = (f"{number:012x}" for number in range(4))
    for id in (revoked, used_up, good):
        door.invite(id)
    door.revoke(revoked)
    door.enrol(invitation=used_up)
    assert door.invite(new) is None
    assert set(door.world.state.ledger.access.invitations) == {good, new}


def test_a_restarted_coordinator_knows_everybody_again(door: Door) -> None:
    door.invite(uses=3)
    for name in "ab":
        door.enrol(name)
    door.revoke("b")
    again = fold(door.world.log, door.world.start)
    resumed = fold([ev.CoordinatorStopped("why"), ev.RunResumed("why", {}, {})], again)
    before = door.world.state.ledger
    assert resumed.access == before.access
