"""The doctor gathers facts: of this machine, of its candidates, and of a coordinator that is there."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dtfm.coordinator.service import knocking
from dtfm.coordinator.service.first_access import node_invitation
from dtfm.node.doctor import doctor
from dtfm.node.doctor.doctor import Place, examine, look_at_coordinator, look_at_tcp, look_at_ways
from dtfm.node.doctor.findings import Finding
from dtfm.node.network.addresses import Interface, candidates
from dtfm.protos import knock as knock_module
from dtfm.protos.access import Role
from dtfm.protos.control_pb2 import KnockReply
from dtfm.protos.enrolment import Entry, NotAdmitted
from tests.coordinator.serving import Served, serving


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        yield served


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))


def by_check(found: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in found}


def entry(where: object) -> Entry:
    return Entry(str(where), [Role.NODE], "doctor")


def here(*advertise: str) -> Place:
    return Place("127.0.0.1:0", "cpu", Path(), advertise, facing="127.0.0.1")


@pytest.fixture
def as_stranger(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of another machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "stranger"))


@pytest.mark.usefixtures("as_stranger")
async def test_a_good_invitation_is_called_good_and_not_used_up(served: Served) -> None:
    assert by_check(await look_at_coordinator(entry(served.invitation)))["coordinator"].good
    found = by_check(await look_at_ways(here(), entry(served.invitation)))
    assert found["invitation"].good
    assert {holder.role for holder in served.ledger.access.names.values()} <= {Role.OPERATOR}  # nobody was enrolled
    assert served.ledger.access.invitations[served.invitation.id].used == 0


async def test_the_coordinator_says_which_candidates_it_reaches(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knocking, "is_own", lambda _: False)  # as if this were another machine
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(30)
        elsewhere = f"127.0.0.1:{other.getsockname()[1]}"
        answering = asyncio.create_task(asyncio.to_thread(answer_wrongly, other))
        found = await look_at_ways(here(elsewhere, "192.0.2.77:9000"), entry(served.address))
        await answering
    of = by_check(found)
    assert of["reach"].finding == "the coordinator reaches this machine"
    assert of[f"candidate {elsewhere}"].good is False
    assert "not reached by the coordinator (another program answers there)" in of[f"candidate {elsewhere}"].finding
    assert "not reached from here" in of["candidate 192.0.2.77:9000"].finding  # it dials nobody but the caller
    (own,) = [each for each in found if "from interface: reached by the coordinator" in each.finding]
    assert own.good


@pytest.mark.parametrize("failed", ["first", "second"])
async def test_it_says_when_the_coordinator_did_not_dial(
    served: Served, failed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way_in, calls = entry(served.address), []
    real = way_in.knock

    async def knock(addresses: Sequence[str], token: bytes, timeout: float) -> KnockReply:
        calls.append(addresses)
        if len(calls) == (1 if failed == "first" else 2):
            raise NotAdmitted("BUSY", "8 others are being dialled, as many as can be; ask again in some seconds")
        return await real(addresses, token, timeout)

    monkeypatch.setattr(way_in, "knock", knock)
    found = by_check(await look_at_ways(here(), way_in))
    assert found["outside"].good is None
    assert "8 others are being dialled" in found["outside"].finding
    assert "run the doctor again" in found["outside"].fix
    assert not any(finding.good is False for finding in found.values())


def answer_wrongly(server: socket.socket) -> None:
    """To this machine, and to the coordinator."""
    for _ in range(2):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2")


@pytest.mark.usefixtures("as_stranger")
async def test_a_bad_invitation_is_named(served: Served) -> None:
    expired, secret = node_invitation(time.time() - 8 * 86400, 1, "late")
    served.server.begin_with([expired])
    late = served.server.invitation(expired.invitation, secret)
    found = by_check(await look_at_ways(here(), entry(late)))
    assert found["invitation"].good is False
    assert "INVITATION_EXPIRED" in found["invitation"].finding
    found = by_check(await look_at_ways(here(), entry(served.address)))
    assert "INVITATION_NEEDED" in found["invitation"].finding
    found = by_check(await look_at_coordinator(entry(replace(served.invitation, pin=bytes(32)))))
    assert found["coordinator"].good is False
    assert "another run" in found["coordinator"].finding


async def test_each_candidate_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        elsewhere = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setattr(knock_module, "KNOCK_SECONDS", 0.2)
        place = Place("127.0.0.1:0", "cpu", tmp_path, (elsewhere,), facing="127.0.0.1")
        found = await look_at_ways(place)
    (own,) = [each for each in found if each.finding == "loopback, from interface: reached from here"]
    assert own.good
    given = by_check(found)[f"candidate {elsewhere}"]
    assert given.good is None
    assert "from --advertise: not reached from here (no answer" in given.finding


async def test_a_wildcard_is_reached_over_both_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    knocked = []

    async def dial(host: str, port: int, token: bytes) -> str:
        knocked.append(host)
        return await knock_module.dial("127.0.0.1" if host.startswith("192") else "::1", port, token)

    monkeypatch.setattr(doctor, "dial", dial)
    found_here = [Interface("a", "192.168.1.5"), Interface("a", "2001:db8::5")]
    monkeypatch.setattr(doctor, "candidates", partial(candidates, found=lambda: found_here))
    found = await look_at_ways(Place("0.0.0.0:0", "cpu", tmp_path))
    assert len(knocked) == 2
    assert all(each.good for each in found)


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (found,) = await look_at_ways(Place(address, "cpu", tmp_path))
    assert (found.good, address in found.finding) == (False, True)


async def test_all_of_it_is_looked_at(served: Served, tmp_path: Path) -> None:
    found = await examine(
        entry(served.address), Place("127.0.0.1:0", "cpu", tmp_path / "snapshots", facing="127.0.0.1")
    )
    wanted = {
        "packages",
        "driver",
        "device",
        "disk",
        "open files",
        "coordinator",
        "invitation",
        "listen",
    }
    wanted |= {"reach", "tcp buffers", "congestion control", "tcp pauses"}
    assert wanted <= {each.check for each in found}
    assert all(each.fix for each in found if each.good is False)


def test_tcp_settings_may_be_unknown(tmp_path: Path) -> None:
    assert [each.finding for each in look_at_tcp(tmp_path / "none")] == ["unknown on this system"] * 3
    (tmp_path / "tcp_rmem").write_text("4096 131072 6291456\n")
    (tmp_path / "tcp_wmem").write_text("4096 16384 4194304\n")
    (tmp_path / "tcp_congestion_control").write_text("cubic\n")
    (tmp_path / "tcp_available_congestion_control").write_text("reno cubic\n")
    (tmp_path / "tcp_slow_start_after_idle").write_text("0\n")
    buffers, control, pauses = look_at_tcp(tmp_path)
    assert buffers.finding.startswith("at most 4.0 MiB")
    assert control.fix.startswith("modprobe tcp_bbr; ")
    assert pauses.good
