"""Which names a key gets, by an invitation and without one: `core/members/invitations.py`."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.access import MOST_NAMES_OF_A_KEY
from dtfm.protos.identity.credentials import CERTIFICATE_LIFETIME, public_key
from tests.coordinator.doors import DAY, ID, Door
from tests.coordinator.script import training
from tests.protos.members import key_of


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 0}, wire.PROTOCOL_VERSION),
        ({"name": ""}, wire.MALFORMED),
        ({"name": "a/b"}, wire.MALFORMED),
        ({"name": "x" * 65}, wire.MALFORMED),
    ],
)
def test_a_wrong_enrolment_is_refused(door: Door, changes: dict[str, Any], reason: wire.RefusalReason) -> None:
    door.invite()
    assert door.enrol(**changes) == reason
    assert set(door.world.state.ledger.access.names) == {"operator"}


def test_a_name_belongs_to_the_first_key_that_took_it(door: Door) -> None:
    door.invite(uses=10)
    door.enrol("a")
    assert door.enrol("a", key="b") == wire.NAME_TAKEN
    assert "--id NAME" in door.sentence
    assert door.world.state.ledger.access.names["a"].key == base64.b64encode(public_key(key_of("a"))).decode()


def test_no_name_reads_like_an_invitations_id(door: Door) -> None:
    """Or else revoking the invitation would cut off the name."""
    door.invite(uses=9)
    assert door.enrol(ID) == wire.MALFORMED
    assert f"the name '{ID}' reads like the id of an invitation" in door.sentence
    assert "give another with --id NAME" in door.sentence
    assert [door.enrol(name) for name in (ID[1:], ID + "0", "g123456789ab", "node-" + ID)] == [None] * 4


def test_whoever_was_enrolled_needs_no_invitation_again(door: Door) -> None:
    door.invite(seconds=DAY)
    door.enrol()
    before = len(door.world.log)
    door.now += 10 * DAY
    assert door.enrol() is None
    assert door.enrol(invitation="", secret=b"") is None
    assert len(door.world.log) == before


def test_further_nodes_with_a_machines_key_need_no_invitation_up_to_a_bound(door: Door) -> None:
    door.invite(uses=2)
    door.enrol("a")
    for number in range(2, MOST_NAMES_OF_A_KEY + 1):
        assert door.enrol(f"a-{number}", key="a", invitation="", secret=b"") is None
    assert door.enrol("a-more", key="a") == wire.FULL
    assert door.world.state.ledger.access.invitations[ID].used == 1
    assert {
        holder.invitation for name, holder in door.world.state.ledger.access.names.items() if name != "operator"
    } == {ID}
    assert door.enrol("b") is None
    assert door.enrol("c") == wire.INVITATION_USED_UP


def test_only_a_nodes_key_gives_names_and_only_nodes_names(door: Door) -> None:
    door.invite()
    door.enrol("a")
    assert door.enrol("boss", key="a", roles=["operator"]) == wire.INVITATION_USED_UP
    assert door.enrol("b", key="operator", invitation="", secret=b"") == wire.UNKNOWN_KEY
    assert door.enrol("operator", key="a") == wire.NAME_TAKEN


def test_each_further_name_of_a_viewers_key_is_a_use_and_there_are_few(door: Door) -> None:
    looks: dict[str, Any] = {"key": "v", "roles": ["viewer"]}
    door.invite(role="viewer", uses=2)
    assert [door.enrol(f"v-{n}", **looks) for n in range(3)] == [None, None, wire.INVITATION_USED_UP]
    many = "ba9876543210"
    door.invite(many, role="viewer", uses=100)
    for number in range(3, MOST_NAMES_OF_A_KEY + 1):
        assert door.enrol(f"v-{number}", **looks, invitation=many) is None
    assert door.enrol("v-more", **looks, invitation=many) == wire.FULL


def test_a_viewer_with_an_operators_invitation_becomes_an_operator_and_uses_it_up(door: Door) -> None:
    door.enrolled("v", "viewer")
    door.invite(role="operator")
    looks: dict[str, Any] = {"roles": ["viewer", "operator"]}
    assert door.enrol("v", **looks, invitation="", secret=b"") is None
    assert door.world.state.ledger.access.names["v"].role == "viewer"
    assert door.enrol("v", **looks, secret=bytes(31) + b"x") is wire.INVITATION_UNKNOWN
    assert door.enrol("v", **looks) is None
    assert door.world.state.ledger.access.names["v"].role == "operator"
    assert door.world.state.ledger.access.invitations[ID].used == 1


def test_certificates_are_renewed_when_half_of_their_time_has_passed() -> None:
    world = training("a", "b")
    assert world.certified == ["a", "b"]
    world.now += CERTIFICATE_LIFETIME.total_seconds() / 2 - 1
    world.feed(t.TimePassed())
    assert world.certified == ["a", "b"]
    world.now += 2
    world.feed(t.TimePassed())
    world.feed(t.TimePassed())
    assert world.certified == ["a", "b", "a", "b"]
