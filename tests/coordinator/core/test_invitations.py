"""Who is enrolled by an invitation, who is not, and how both end: `core/invitations.py`."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.core import invitations
from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state import Switching
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log import fold as folding
from dtfm.coordinator.log.fold import fold
from dtfm.protos import PROTOCOL_VERSION
from dtfm.protos import control_pb2 as wire
from dtfm.protos.access import MOST_NAMES_OF_A_KEY
from dtfm.protos.credentials import CERTIFICATE_LIFETIME, public_key
from dtfm.protos.invitation import secret_digest
from tests.coordinator.script import World, refusal_of, training
from tests.protos.members import key_of

NOW = 1_800_000_000.0
DAY = 86400.0
ID, SECRET = "0123456789ab", bytes(32)


class Door:
    """Asks one thing after the other of a World, at ``now`` (seconds since 1970). The operator is enrolled there."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = NOW
        self._ticket = 0
        self.enrolled("operator", "operator")

    def enrolled(self, name: str, role: str, invitation: str = "") -> None:
        """By whom the test does not care."""
        key = base64.b64encode(public_key(key_of(name))).decode()
        state = self.world.state
        ledger = fold([ev.Enrolled(name, role, key, invitation)], state.ledger)
        self.world.state = replace(state, ledger=ledger)
        self.world.start = fold([ev.Enrolled(name, role, key, invitation)], self.world.start)

    def invite(self, id: str = ID, by: str = "operator", **changes: Any) -> wire.RefusalReason | None:
        request = wire.InviteRequest(**{"name": "Bob", "role": "node", "seconds": 7 * DAY, "uses": 1, **changes})
        return self._ask(t.InviteAsked(self._next(), id, secret_digest(SECRET), request, by, self.now))

    def enrol(self, name: str = "a", key: str | None = None, **changes: Any) -> wire.RefusalReason | None:
        fields = {
            "protocol_version": PROTOCOL_VERSION,
            "invitation": ID,
            "secret": SECRET,
            "name": name,
            "public_key": public_key(key_of(key or name)),
            "roles": ["node"],
        }
        return self._ask(t.EnrolAsked(self._next(), wire.EnrolRequest(**{**fields, **changes}), self.now))

    def revoke(self, what: str, by: str = "operator") -> wire.RefusalReason | None:
        return self._ask(t.RevokeAsked(self._next(), what, by, self.now))

    @property
    def sentence(self) -> str:
        """Of the last refusal, or of the last answer to a revocation."""
        if self._ticket in self.world.refusals:
            return str(self.world.refusals[self._ticket])
        granted = self.world.granted[self._ticket]
        return granted.sentence if isinstance(granted, wire.RevokeReply) else ""

    def _next(self) -> int:
        self._ticket += 1
        return self._ticket

    def _ask(self, question: t.Input) -> wire.RefusalReason | None:
        """The reason of the refusal; None: it was granted."""
        self.world.feed(question)
        refused = self.world.refusals.get(self._ticket)
        assert (refused is None) == (self._ticket in self.world.granted)
        return refused.reason if refused is not None else None


@pytest.fixture
def door() -> Door:
    return Door(World())


def test_who_shows_the_secret_gets_the_name_and_the_role(door: Door) -> None:
    assert door.invite() is None
    assert door.enrol() is None
    holder = door.world.state.ledger.access["a"]
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


def test_a_viewer_with_an_operators_invitation_becomes_an_operator_and_uses_it_up(door: Door) -> None:
    door.enrolled("v", "viewer")
    door.invite(role="operator")
    looks: dict[str, Any] = {"roles": ["viewer", "operator"]}
    assert door.enrol("v", **looks, invitation="", secret=b"") is None
    assert door.world.state.ledger.access["v"].role == "viewer"
    assert door.enrol("v", **looks, secret=bytes(31) + b"x") is wire.INVITATION_UNKNOWN
    assert door.enrol("v", **looks) is None
    assert door.world.state.ledger.access["v"].role == "operator"
    assert door.world.state.ledger.invitations[ID].used == 1


def test_further_nodes_with_a_machines_key_need_no_invitation_up_to_a_bound(door: Door) -> None:
    door.invite(uses=2)
    door.enrol("a")
    for number in range(2, MOST_NAMES_OF_A_KEY + 1):
        assert door.enrol(f"a-{number}", key="a", invitation="", secret=b"") is None
    assert door.enrol("a-more", key="a") == wire.FULL
    assert door.world.state.ledger.invitations[ID].used == 1
    assert {holder.invitation for name, holder in door.world.state.ledger.access.items() if name != "operator"} == {ID}
    assert door.enrol("b") is None
    assert door.enrol("c") == wire.INVITATION_USED_UP


def test_only_a_nodes_key_gives_names_and_only_nodes_names(door: Door) -> None:
    door.invite()
    door.enrol("a")
    assert door.enrol("boss", key="a", roles=["operator"]) == wire.INVITATION_USED_UP
    assert door.enrol("b", key="operator", invitation="", secret=b"") == wire.UNKNOWN_KEY
    assert door.enrol("operator", key="a") == wire.NAME_TAKEN


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
    assert door.enrol("a-3", key="a", invitation="", secret=b"") == wire.UNKNOWN_KEY


def test_whoever_was_enrolled_needs_no_invitation_again(door: Door) -> None:
    door.invite(seconds=DAY)
    door.enrol()
    before = len(door.world.log)
    door.now += 10 * DAY
    assert door.enrol() is None
    assert door.enrol(invitation="", secret=b"") is None
    assert len(door.world.log) == before


def test_a_name_belongs_to_the_first_key_that_took_it(door: Door) -> None:
    door.invite(uses=10)
    door.enrol("a")
    assert door.enrol("a", key="b") == wire.NAME_TAKEN
    assert "--id NAME" in door.sentence
    assert door.world.state.ledger.access["a"].key == base64.b64encode(public_key(key_of("a"))).decode()


def test_a_role_is_the_invitations_and_one_that_is_of_no_use_is_not_used_up(door: Door) -> None:
    door.invite(role="viewer")
    assert door.enrol() == wire.ROLE
    assert "the invitation is for a viewer; ask for another (invite --role)" in door.sentence
    assert door.enrol(roles=["operator", "viewer"]) is None
    assert door.enrol() == wire.ROLE


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
    assert set(door.world.state.ledger.access) == {"operator"}


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
    for module in (folding, invitations):
        monkeypatch.setattr(module, "MOST_INVITATIONS", 3)
    ids = [f"{number:012x}" for number in range(4)]
    assert [door.invite(id, seconds=DAY) for id in ids] == [None, None, None, wire.FULL]
    assert "revoke some" in door.sentence
    door.now += 2 * DAY
    assert door.invite(ids[3]) is None
    assert set(door.world.state.ledger.invitations) == {ids[3]}
    monkeypatch.setattr(invitations, "MOST_NAMES", 2)
    door.invite(uses=10)
    assert [door.enrol(name) for name in "ab"] == [None, wire.FULL]


def test_those_that_are_not_good_any_more_make_room(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (folding, invitations):
        monkeypatch.setattr(module, "MOST_INVITATIONS", 3)
    revoked, used_up, good, new = (f"{number:012x}" for number in range(4))
    for id in (revoked, used_up, good):
        door.invite(id)
    door.revoke(revoked)
    door.enrol(invitation=used_up)
    assert door.invite(new) is None
    assert set(door.world.state.ledger.invitations) == {good, new}


def test_a_revoked_invitation_is_not_good_any_more_but_who_came_by_it_stays(door: Door) -> None:
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
    assert f"invitation {ID}, by which it came, is not good any more" in door.sentence
    assert "who came by it stays" not in door.sentence
    assert door.enrol("other") == wire.REVOKED


def test_who_else_came_by_the_invitation_of_a_revoked_name_is_named(door: Door) -> None:
    door.invite(uses=4)
    for name in "abc":
        door.enrol(name)
    door.revoke("a")
    assert "who came by it stays (b, c), unless you revoke them by name" in door.sentence


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
    assert f"invitations {ID}, by which it came, and {made}, made by it, are not good any more" in door.sentence
    assert "who came by them stays (a, b), unless you revoke them by name" in door.sentence
    assert door.world.events(ev.Revoked)[-1].invitations == (ID, made)
    for id in (ID, made):
        assert door.enrol("eve-2", invitation=id, roles=["operator"]) == wire.REVOKED
    assert door.enrol("c", invitation=others) is None


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
    monkeypatch.setattr(folding, "MOST_REVOKED", 2)
    for number, name in enumerate("zxya"):
        door.invite(f"{number:012x}")
        door.enrol(name, invitation=f"{number:012x}")
        door.revoke(name)
    assert list(door.world.state.ledger.revoked) == ["y", "a"]


def test_no_name_reads_like_an_invitations_id(door: Door) -> None:
    """Or else revoking the invitation would cut off the name."""
    door.invite(uses=9)
    assert door.enrol(ID) == wire.MALFORMED
    assert f"the name '{ID}' reads like the id of an invitation" in door.sentence
    assert "give another with --id NAME" in door.sentence
    assert [door.enrol(name) for name in (ID[1:], ID + "0", "g123456789ab", "node-" + ID)] == [None] * 4


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


def test_each_further_name_of_a_viewers_key_is_a_use_and_there_are_few(door: Door) -> None:
    looks: dict[str, Any] = {"key": "v", "roles": ["viewer"]}
    door.invite(role="viewer", uses=2)
    assert [door.enrol(f"v-{n}", **looks) for n in range(3)] == [None, None, wire.INVITATION_USED_UP]
    many = "ba9876543210"
    door.invite(many, role="viewer", uses=100)
    for number in range(3, MOST_NAMES_OF_A_KEY + 1):
        assert door.enrol(f"v-{number}", **looks, invitation=many) is None
    assert door.enrol("v-more", **looks, invitation=many) == wire.FULL


def test_members_are_told_once_of_all_names_that_end_with_a_key() -> None:
    world = training("a", "b", "c")
    door = Door(world)
    door.invite(uses=3)
    for name, key in (("a", "a"), ("a-2", "a"), ("b", "b")):
        door.enrol(name, key=key)
    door.revoke("a")
    assert world.kinds_to("b").count("revoked") == 1
    assert list(world.last_to("b", "revoked").names) == ["a", "a-2"]


def test_a_member_that_joins_later_learns_who_was_revoked() -> None:
    world = training("a", "b")
    door = Door(world)
    door.invite(uses=3)
    door.enrol("x")
    door.revoke("x")
    world.greet("c")
    assert list(world.last_to("c", "welcome").revoked) == ["x"]


def test_a_process_that_waits_for_a_revoked_name_does_not_get_it() -> None:
    world = World()
    door = Door(world)
    door.invite()
    door.enrol()
    world.greet("a", incarnation=1)
    second = world.greet("a", incarnation=2)
    door.revoke("a")
    assert second in world.hung_up
    assert not world.state.members.contenders
    assert not world.state.members.sessions


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


def test_a_call_that_was_made_before_the_revocation_comes_too_late(door: Door) -> None:
    door.invite()
    door.enrol()
    door.revoke("a")
    assert refusal_of(door.world, door.world.greet("a")).reason == wire.REVOKED
    assert not door.world.state.members.sessions


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


def test_a_restarted_coordinator_knows_everybody_again(door: Door) -> None:
    door.invite(uses=3)
    for name in "ab":
        door.enrol(name)
    door.revoke("b")
    again = fold(door.world.log, door.world.start)
    resumed = fold([ev.CoordinatorStopped("why"), ev.RunResumed("why", {})], again)
    for field in ("invitations", "access", "revoked"):
        assert getattr(resumed, field) == getattr(door.world.state.ledger, field)
