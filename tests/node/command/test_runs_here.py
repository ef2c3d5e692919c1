"""A user without an invitation is told what there is on the local network."""

from __future__ import annotations

import json
import logging

import pytest

from dtfm.node.command import runs_here
from dtfm.node.command.runs_here import list_runs, tell_which
from dtfm.protos.identity.invitation import Invitation
from dtfm.protos.local_network.announcement import Announcement
from dtfm.protos.printable import JsonFormatter

PIN = bytes(range(32))
HERE = Announcement("stories", "llama, 1.1B parameters", PIN, ("192.168.1.2:7400",))
NAMESAKE = Announcement("stories", "", bytes(32), ("192.168.1.3:7400",))


def announced(monkeypatch: pytest.MonkeyPatch, *announcements: Announcement, others: int = 0) -> None:
    async def here() -> tuple[list[Announcement], int]:
        return list(announcements), others

    monkeypatch.setattr(runs_here, "runs_here", here)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_each_run_is_listed_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    announced(monkeypatch, HERE)
    assert list_runs() == [HERE]
    line = "run 'stories', trains llama, 1.1B parameters; owner's fingerprint 0001 0203 0405 0607; at 192.168.1.2:7400"
    assert caplog.text.count(line) == 1
    assert "Several runs" not in caplog.text


def test_two_runs_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    announced(monkeypatch, HERE, NAMESAKE)
    assert list_runs() == [HERE, NAMESAKE]
    assert "run 'stories'; owner's fingerprint 0000 0000 0000 0000; at 192.168.1.3:7400" in caplog.text
    assert caplog.text.count("Several runs are called 'stories'. Only the fingerprint tells them apart") == 1


def test_what_is_not_listed_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    announced(monkeypatch, HERE, others=10_000)
    list_runs()
    assert len(caplog.records) == 3
    assert caplog.messages[-1].startswith("Other announcements are not listed, as no such run answers there")


def test_in_json_each_run_has_its_fields(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    announced(monkeypatch, HERE)
    list_runs()
    told = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [each["run"] for each in told if "run" in each] == ["stories"]
    assert told[-1]["authority"] == PIN.hex()
    assert told[-1]["addresses"] == ["192.168.1.2:7400"]


def test_where_nobody_can_be_asked_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def here() -> tuple[list[Announcement], int]:
        raise OSError("this machine has no address on a local network")

    monkeypatch.setattr(runs_here, "runs_here", here)
    assert list_runs() == []
    assert (
        caplog.messages[-1] == "This network cannot be asked for runs: this machine has no address on a local network."
    )


def test_whose_invitation_it_is_is_told(caplog: pytest.LogCaptureFixture) -> None:
    invitation = Invitation(("192.168.1.9:7400",), bytes(32), "00" * 6, bytes(32))
    tell_which(invitation, [HERE])
    assert "is of none of these: its owner's fingerprint is 0000 0000 0000 0000. It leads to 192.168.1.9:7400" in (
        caplog.text
    )
    tell_which(invitation, [HERE, NAMESAKE])
    assert caplog.messages[-1] == "The invitation is of run 'stories', fingerprint 0000 0000 0000 0000."
