"""A user without an invitation is told what there is on the local network."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest

from dtfm.node.command import runs_here
from dtfm.node.command.runs_here import list_runs, tell_which
from dtfm.protos.identity.invitation import Invitation
from dtfm.protos.local_network.announcement import MOST_FOUND, Announcement
from dtfm.protos.printable import JsonFormatter

PIN = bytes(range(32))
HERE = Announcement("stories", "llama, 1.1B parameters", PIN, ("192.168.1.2:7400",))
NAMESAKE = Announcement("stories", "", bytes(32), ("192.168.1.3:7400",))


def announced(monkeypatch: pytest.MonkeyPatch, *announcements: Announcement) -> None:
    async def look_around(heard: Callable[[Announcement], None]) -> None:
        for announcement in announcements:
            heard(announcement)

    monkeypatch.setattr(runs_here, "look_around", look_around)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_each_run_is_listed_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    announced(monkeypatch, HERE, HERE)
    assert list_runs() == (HERE,)
    line = "run 'stories', trains llama, 1.1B parameters; owner's fingerprint 0001 0203 0405 0607; at 192.168.1.2:7400"
    assert caplog.text.count(line) == 1
    assert "Several runs" not in caplog.text


def test_two_runs_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    announced(monkeypatch, HERE, NAMESAKE)
    assert list_runs() == (HERE, NAMESAKE)
    assert "run 'stories'; owner's fingerprint 0000 0000 0000 0000; at 192.168.1.3:7400" in caplog.text
    assert caplog.text.count("Several runs are called 'stories'. Only the fingerprint tells them apart") == 1


def test_of_a_flood_little_is_printed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    names = (f"run {number}" for number in range(10_000))
    announced(
        monkeypatch,
        *(Announcement(n, "", i.to_bytes(32, "big"), (f"10.0.0.{i % 250}:7400",)) for i, n in enumerate(names)),
    )
    assert len(list_runs()) == MOST_FOUND
    assert len(caplog.records) == MOST_FOUND + 2  # the first and the last line
    assert caplog.messages[-1] == "There are more runs than are listed, or somebody says so of many."


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
    async def look_around(heard: Callable[[Announcement], None]) -> None:
        raise OSError("this machine has no address on a local network")

    monkeypatch.setattr(runs_here, "look_around", look_around)
    assert list_runs() == ()
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
