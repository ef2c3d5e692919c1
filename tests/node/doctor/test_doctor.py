"""The doctor gathers facts: of this machine, of its port, and of a coordinator that is there."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtfm.node.doctor.doctor import Place, examine, look_at_coordinator, look_at_port, look_at_tcp
from dtfm.node.doctor.findings import Finding
from dtfm.node.network.home_router import HomeRouter
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.enrolment import Entry
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


@pytest.fixture
def as_stranger(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of another machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "stranger"))


@pytest.mark.usefixtures("as_stranger")
async def test_the_coordinator_is_asked_who_it_is_and_no_invitation_is_used_up(served: Served) -> None:
    assert (await look_at_coordinator(entry(served.invitation))).good
    assert {holder.role for holder in served.ledger.access.names.values()} <= {Role.OPERATOR}  # nobody was enrolled
    assert served.ledger.access.invitations[served.invitation.id].used == 0
    found = await look_at_coordinator(entry(replace(served.invitation, pin=bytes(32))))
    assert (found.good, "another run" in found.finding) == (False, True)


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (found,) = await look_at_port(Place(address, "cpu", tmp_path))
    assert (found.good, address in found.finding) == (False, True)


async def test_behind_nat_others_reach_what_the_router_has_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opened(_: HomeRouter, port: int) -> str:
        return f"198.51.100.7:{port}"

    monkeypatch.setattr(HomeRouter, "open", opened)
    place = Place("0.0.0.0:0", "cpu", tmp_path, facing="192.168.1.20", behind_nat=True)
    listen, reach = await look_at_port(place)
    assert (listen.good, reach.good) == (True, True)
    assert "198.51.100.7:" in reach.finding


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
