"""A user who names no coordinator goes to the last one, or is asked for an invitation."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from dtfm.node.command import taking_part
from dtfm.node.command.taking_part import invitation_needed, place_of, take_part
from dtfm.node.host import preemption
from dtfm.node.network.place_on_the_net import NoWayThere
from dtfm.node.settings import Settings
from dtfm.protos.control_pb2 import Device, Hello
from dtfm.protos.identity.access import Access, Role, keep
from dtfm.protos.identity.credentials import make_key
from dtfm.protos.identity.enrolment import Entry
from dtfm.protos.identity.invitation import Invitation
from dtfm.protos.local_network.announcement import Announcement
from tests.node.host.metadata import serving

PIN = bytes(range(32))
INVITATION = str(Invitation(("192.168.1.2:7400",), PIN, "00" * 6, bytes(32)))


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> list[Announcement]:
    """The runs that are heard of on the local network."""
    runs: list[Announcement] = []
    monkeypatch.setattr(taking_part, "list_runs", lambda: runs)
    return runs


@pytest.mark.parametrize("enrolled", [True, False])
def test_whoever_was_enrolled_anywhere_needs_no_invitation(enrolled: bool) -> None:
    keep(Access(("192.168.1.9:7400",), PIN, "a", Role.NODE, make_key(), enrolled=enrolled))
    if enrolled:
        assert invitation_needed("dtfm-node join") == ""
    else:
        with pytest.raises(ValueError, match=r"^no run .* invitation is needed; .*\n    dtfm-node join dtfm1\.\.\.\."):
            invitation_needed("dtfm-node join")


def test_on_a_terminal_the_invitation_is_asked_for_until_it_is_one(
    here: list[Announcement],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    here.append(Announcement("stories", "llama", PIN, ("192.168.1.2:7400",)))
    caplog.set_level(logging.INFO)
    typed = iter(["nonsense", INVITATION[:50], f" {INVITATION}\n"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(getpass, "getpass", lambda *_: next(typed))
    assert invitation_needed("dtfm-node join") == INVITATION
    assert "truncated" in capsys.readouterr().err
    assert "The invitation is of run 'stories', fingerprint 0001 0203 0405 0607." in caplog.text


def test_without_a_terminal_the_runs_are_listed_and_the_invitation_is_asked_of_the_owner(
    here: list[Announcement], monkeypatch: pytest.MonkeyPatch
) -> None:
    here.append(Announcement("stories", "llama", PIN, ("192.168.1.2:7400",)))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    with pytest.raises(ValueError, match=r"^an invitation is needed; ask whoever runs the coordinator"):
        invitation_needed("dtfm-node join")


@pytest.mark.parametrize("found", [True, False])
def test_where_no_way_leads_to_the_coordinator_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    entry, asked = Entry(INVITATION, [Role.NODE], "a"), list[str]()

    def place(coordinator: Entry) -> tuple[str, bool]:
        if coordinator.leads_to[0][0] == "192.168.1.2:7400":
            raise NoWayThere("nothing leads to 192.168.1.2")
        return "192.168.7.3", False

    async def follow(coordinator: Entry) -> bool:
        asked.append(str(coordinator))
        if found:
            coordinator.has_moved("192.168.7.2:7400")
        return found

    monkeypatch.setattr(taking_part, "place_on_the_net", place)
    monkeypatch.setattr(taking_part, "follow", follow)
    if found:
        assert place_of(entry, "0.0.0.0:0", None)[2] == "192.168.7.3"
    else:
        with pytest.raises(NoWayThere, match="nothing leads"):
            place_of(entry, "0.0.0.0:0", None)
    assert asked == ["192.168.1.2:7400"]


class Leaves:
    """In place of a session: it is over once it has left, which takes until the host's SIGTERM comes as well."""

    def __init__(self, *_: object) -> None:
        self.reasons: list[str] = []
        self.problem = ""
        self._left = asyncio.Event()

    def places(self, record: logging.LogRecord) -> bool:
        return True

    def status_line(self) -> str:
        return ""

    def leave(self, reason: str) -> None:
        self.reasons.append(reason)
        if len(self.reasons) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._left.set()

    async def run(self) -> int:
        await self._left.wait()
        return 0


async def test_a_preemption_notice_is_a_reason_to_leave_and_the_signal_after_it_is_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Leaves()
    monkeypatch.setattr("dtfm.node.session.Session", lambda *_: session)
    monkeypatch.setattr(preemption, "cloud_here", lambda _: preemption.CLOUDS[1])
    with serving("Google Cloud", tmp_path) as service:
        monkeypatch.setattr(preemption.preemption_notice, "__defaults__", (service, 0.01))
        (tmp_path / "notice").touch()
        assert await take_part(settings(leave_on_preemption=True), torch.device("cpu"), Device()) == 0
    notice, signalled = session.reasons
    assert notice.startswith("Google Cloud takes this machine back (")
    assert signalled == "SIGTERM"


async def test_with_preemption_off_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Leaves()
    monkeypatch.setattr("dtfm.node.session.Session", lambda *_: session)
    monkeypatch.setattr("dtfm.node.command.taking_part.notices", None)
    joined = asyncio.create_task(take_part(settings(leave_on_preemption=False), torch.device("cpu"), Device()))
    await asyncio.sleep(0)
    session.leave("once")
    session.leave("twice")
    assert await joined == 0


def settings(*, leave_on_preemption: bool) -> Settings:
    entry = Entry(INVITATION, [Role.NODE], "n")
    return Settings(entry, "n", "127.0.0.1:0", (), "127.0.0.1", Hello.NO, 1.0, leave_on_preemption=leave_on_preemption)
