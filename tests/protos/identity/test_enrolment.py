"""The way into a run: by an invitation once, then by what is remembered; and every refusal by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path

import grpc.aio
import pytest

from dtfm.coordinator.service.first_access import node_invitation
from dtfm.protos import control_pb2 as wire
from dtfm.protos.connection import read_address, server_options
from dtfm.protos.identity import credentials
from dtfm.protos.identity.access import Role, keep, kept
from dtfm.protos.identity.credentials import coordinator_credentials, make_authority, make_key
from dtfm.protos.identity.enrolment import Entry, NotAdmitted, Opened
from dtfm.protos.identity.invitation import Invitation, read_invitation
from tests.coordinator.serving import Served, serving
from tests.protos.members import NOW

NODE, LOOKING = [Role.NODE], [Role.VIEWER, Role.OPERATOR]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A coordinator on another machine."""
    async with serving(tmp_path) as served:
        yield served


@pytest.fixture(autouse=True)
def own_state(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    return tmp_path / "mine" / "dtfm" / "access"


async def enter(where: object, roles: list[Role], name: str = "a") -> Opened:
    return await Entry(str(where), roles, name).open(10)


async def refusal(where: object, roles: list[Role], name: str = "a") -> NotAdmitted:
    with pytest.raises(NotAdmitted) as caught:
        await enter(where, roles, name)
    return caught.value


async def invited(served: Served, role: Role, uses: int = 1, seconds: float = 60) -> str:
    request = wire.InviteRequest(role=role.value, seconds=seconds, uses=uses)
    reply = await served.server.ask(request, served.operator)
    assert isinstance(reply, wire.InviteReply)
    return reply.invitation


async def test_a_node_shows_its_invitation_once_and_is_known_from_then_on(served: Served) -> None:
    invitation = await invited(served, Role.NODE)
    first = await enter(invitation, NODE)
    assert (first.access.name, first.access.role, first.address) == ("a", Role.NODE, served.address)
    for where in (served.address, "", invitation):  # as after a restart
        again = await enter(where, NODE)
        assert again.access == first.access


async def test_further_nodes_of_a_machine_use_no_more_of_its_invitation(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invitation = await invited(served, Role.NODE)
    together = await asyncio.gather(*(enter(invitation, NODE, name) for name in ("a", "b")))
    for where in (served.address, ""):
        together.append(await enter(where, NODE, f"c{len(where)}"))
    assert len({opened.access.key for opened in together}) == 1
    assert sum(invited.used for invited in served.server.ledger.access.invitations.values()) == 1
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    assert (await refusal(invitation, NODE, "d")).reason == "INVITATION_USED_UP"


async def test_a_machine_that_was_cut_off_gets_no_further_node_in(served: Served) -> None:
    await enter(await invited(served, Role.NODE), NODE)
    await served.server.ask(wire.RevokeRequest(what="a"), served.operator)
    assert (await refusal("", NODE, "b")).reason == "UNKNOWN_KEY"


async def test_the_key_is_on_disk_before_it_is_enrolled(served: Served, own_state: Path) -> None:
    invitation = await invited(served, Role.NODE, seconds=1)
    await served.server.ask(wire.RevokeRequest(what=invitation_id(invitation)), served.operator)
    assert (await refusal(invitation, NODE)).reason == "REVOKED"
    (before,) = kept(NODE)
    assert not before.enrolled
    assert (await refusal(served.address, NODE)).reason == "INVITATION_NEEDED"
    opened = await enter(await invited(served, Role.NODE), NODE)
    assert opened.access.key == before.key


async def test_a_node_does_not_overwrite_another_key_of_its_users(served: Served) -> None:
    operator = await enter(await invited(served, Role.OPERATOR), LOOKING, "me")
    refused = await refusal(await invited(served, Role.NODE), NODE, "me")
    assert (refused.reason, "--id NAME" in refused.sentence) == ("NAME_TAKEN", True)
    assert kept(list(Role)) == [operator.access]


async def test_an_invitation_may_be_in_a_file(served: Served, tmp_path: Path) -> None:
    (tmp_path / "invitation").write_text(await invited(served, Role.NODE) + "\n")
    assert (await enter(tmp_path / "invitation", NODE)).access.name == "a"
    (tmp_path / "other").write_text("not one")
    with pytest.raises(ValueError, match="this is no invitation"):
        Entry(str(tmp_path / "other"), NODE, "a")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[:-10], "truncated: it has"),
        (lambda text: text[:-20] + "A" * 20, "mistyped: its checksum differs"),
        (lambda text: "dtfm2" + text[5:], "of version 2"),
        (lambda text: "127.0.0.1", "give HOST:PORT, like 192.168.1.20:7400; or an invitation"),
    ],
)
async def test_a_damaged_invitation_is_named(served: Served, damage: Callable[[str], str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Entry(damage(str(served.invitation)), NODE, "a")


@pytest.mark.parametrize("around", ['"{}"', "'{}'", " {}\n", "dtfm-node join {}", "DTFM_INVITATION={}"])
async def test_what_a_paste_or_an_env_file_leaves_around_an_invitation_does_no_harm(
    served: Served, around: str
) -> None:
    assert Entry(around.format(served.invitation), NODE, "a").leads_to == (
        served.invitation.addresses,
        served.invitation.pin,
    )


@pytest.mark.parametrize("damage", ["x{}", "invitation: {}", "a:{}", "/{}", "{}:", "::{}", "{}.txt"])
def test_no_complaint_shows_the_secret(damage: str) -> None:
    text = str(Invitation(("192.168.1.20:7400",), bytes(32), "0123456789ab", bytes(range(32))))
    for damaged in (damage.format(text), damage.format(text[1:])):  # a paste may lose its first character
        with pytest.raises(ValueError, match="invitation") as caught:
            Entry(damaged, NODE, "a")
        assert text[70:80] not in str(caught.value)


async def test_what_the_coordinator_refuses_is_named(served: Served) -> None:
    known = str(served.invitation)
    other_secret = replace(served.invitation, secret=bytes(32))
    assert (await refusal(other_secret, NODE)).reason == "INVITATION_UNKNOWN"
    expired, secret = node_invitation(time.time() - 8 * 86400, 1, "late")
    served.server.begin_with([expired])
    assert (await refusal(served.server.invitation(expired.invitation, secret), NODE)).reason == "INVITATION_EXPIRED"
    refused = await refusal(await invited(served, Role.VIEWER), NODE)
    assert (refused.reason, "invite --role" in refused.sentence) == ("ROLE", True)
    await enter(known, NODE)
    for access in kept(NODE):
        other_key = replace(access, key=make_key(), enrolled=False)
        keep(other_key)
    assert (await refusal(known, NODE)).reason == "NAME_TAKEN"


async def test_an_invitation_of_another_run_or_a_false_coordinator_is_named(served: Served) -> None:
    false = replace(served.invitation, pin=bytes(32))
    refused = await refusal(false, NODE)
    assert refused.reason == "WRONG_AUTHORITY"
    assert "the invitation is of another run, or somebody else answers there" in refused.sentence


@pytest.mark.parametrize("year", [2020, 2100])
async def test_a_wrong_clock_is_named_also_without_an_invitation(
    served: Served, year: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Wrong:
            return cls(year, 1, 2, 3, 4, tzinfo=tz)

    monkeypatch.setattr(credentials, "datetime", Wrong)
    for where in (served.address, str(served.invitation)):
        refused = await refusal(where, NODE)
        assert refused.reason == "WRONG_CLOCK"
        assert f"this machine's clock says {year}-01-02 03:04 UTC" in refused.sentence
        assert "timedatectl set-ntp true" in refused.sentence


async def test_an_address_alone_needs_an_invitation_first(served: Served) -> None:
    assert (await refusal(served.address, NODE)).reason == "INVITATION_NEEDED"
    refused = await refusal(served.address, LOOKING)
    assert "dtfm-coordinator invite --role viewer" in refused.sentence


async def test_an_operators_machine_invites_its_own_nodes(served: Served) -> None:
    await enter(await invited(served, Role.OPERATOR), LOOKING, "me")
    for where in (served.address, ""):
        opened = await enter(where, NODE, f"node{len(where)}")
        assert opened.access.role is Role.NODE
    assert served.server.ledger.access.names["node0"].role == "node"


async def test_a_viewers_machine_does_not(served: Served) -> None:
    await enter(await invited(served, Role.VIEWER), LOOKING, "me")
    assert (await refusal(served.address, NODE)).reason == "INVITATION_NEEDED"


async def test_people_are_remembered_under_the_name_that_was_drawn_first(served: Served) -> None:
    first = await enter(await invited(served, Role.VIEWER), LOOKING, "bob-1")
    assert (await enter(served.address, LOOKING, "bob-2")).access == first.access
    assert (await enter("", LOOKING, "bob-3")).access == first.access


async def test_who_was_revoked_and_is_invited_again_gets_another_name(served: Served) -> None:
    await enter(await invited(served, Role.VIEWER), LOOKING, "bob-1")
    await served.server.ask(wire.RevokeRequest(what="bob-1"), served.operator)
    again = await enter(await invited(served, Role.VIEWER), LOOKING, "bob-2")
    assert again.access.name == "bob-2"


@pytest.mark.parametrize("way", ["nothing", "the address", "the pasted line"])
async def test_on_a_members_machine_the_nodes_key_will_do_to_look(served: Served, way: str) -> None:
    invitation = await invited(served, Role.NODE)
    node = await enter(invitation, NODE, "rented")
    where = {"nothing": "", "the address": served.address, "the pasted line": invitation}[way]
    looking = await Entry(where, LOOKING, "bob", or_as_member=True).open(10)
    assert looking.access == node.access
    assert "bob" not in served.server.ledger.access.names


async def test_who_may_look_does_so_under_that_key_on_a_members_machine_too(served: Served) -> None:
    await enter(await invited(served, Role.VIEWER), LOOKING, "bob")
    await enter(await invited(served, Role.NODE), NODE, "rented")
    opened = await Entry("", LOOKING, "again", or_as_member=True).open(10)
    assert opened.access.name == "bob"


async def test_who_was_let_in_is_not_led_elsewhere_by_who_answers_at_the_address_later(served: Served) -> None:
    await enter(served.invitation, NODE)
    entry = Entry(served.address, NODE, "a")
    await entry.open(10)
    port = read_address(served.address)[1]
    served.task.cancel()
    await served.server.close()
    other = grpc.aio.server(options=server_options())
    other.add_secure_port(f"127.0.0.1:{port}", coordinator_credentials(make_authority(make_key(), NOW)))
    await other.start()
    with pytest.raises(NotAdmitted, match="WRONG_AUTHORITY"):
        await entry.open(10)
    assert (await refusal(served.address, NODE)).reason == "INVITATION_NEEDED"  # of a new process
    await other.stop(None)


async def test_nobody_at_the_address_is_no_refusal(served: Served) -> None:
    nowhere = replace(served.invitation, addresses=("127.0.0.1:1", "[::1]:1"))
    for where in (nowhere, "127.0.0.1:1"):
        with pytest.raises(ConnectionError):
            await enter(where, NODE)


@pytest.mark.parametrize("remembered", ["", "invitation"])
async def test_a_coordinator_that_has_moved_is_remembered_where_it_is(served: Served, remembered: str) -> None:
    stale = replace(served.invitation, addresses=("127.0.0.1:1",))
    entry = Entry(str(stale), NODE, "a")
    entry.has_moved(served.address)
    assert entry.leads_to == ((served.address, "127.0.0.1:1"), served.invitation.pin)
    opened = await entry.open(10)
    assert opened.access.addresses == (served.address, "127.0.0.1:1")
    assert (await entry.open(10)).access == opened.access
    again = await enter(stale if remembered else "", NODE)  # as after a restart
    assert (again.address, again.access) == (served.address, opened.access)


async def test_where_a_coordinator_was_only_said_to_be_nothing_is_remembered(served: Served) -> None:
    entry = Entry(str(served.invitation), NODE, "a")
    entry.has_moved("127.0.0.1:1")
    assert (await entry.open(10)).access.addresses == served.invitation.addresses


def invitation_id(text: str) -> str:
    return read_invitation(text).id
