"""A user who names no coordinator is told what there is, and what is missing."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dtfm.node.network import way_in as module
from dtfm.node.network.way_in import way_in
from dtfm.protos.access import Access, Role, keep
from dtfm.protos.announcement import Announcement
from dtfm.protos.credentials import make_key
from dtfm.protos.invitation import Invitation

PIN = bytes(range(32))
HERE = Announcement("stories", "0.1", PIN, ("192.168.1.2:7400",))
OTHER = Announcement("other", "0.1", bytes(32), ("192.168.1.3:7400",))
INVITATION = str(Invitation(("192.168.1.2:7400",), PIN, "00" * 6, bytes(32)))


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """By address, the pin of who answers there."""
    answers: dict[str, bytes] = {}

    async def fetch(addresses: list[str], pin: bytes, timeout: float) -> tuple[str, bytes]:
        for address in addresses:
            if answers.get(address) == pin:
                return address, b""
        raise ConnectionError("nothing answers")

    monkeypatch.setattr(module, "fetch_authority", fetch)
    return answers


def announced(monkeypatch: pytest.MonkeyPatch, *announcements: Announcement) -> None:
    async def look_around(heard: Callable[[Announcement], None]) -> None:
        for announcement in announcements:
            heard(announcement)

    monkeypatch.setattr(module, "look_around", look_around)


def remember(address: str = "192.168.1.9:7400") -> None:
    keep(Access((address,), PIN, "a", Role.NODE, make_key(), enrolled=True))


@pytest.mark.usefixtures("network")
async def test_what_is_there_is_listed_with_the_line_to_paste(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announced(monkeypatch, HERE, OTHER, HERE)
    with pytest.raises(ValueError, match=r"invitation is needed; .*\n    dtfm-node join dtfm1\.\.\.\."):
        await way_in("dtfm-node join")
    listed = capsys.readouterr().err
    assert listed.count("run 'stories' at 192.168.1.2:7400, authority 000102030405, dtfm 0.1") == 1
    assert "run 'other' at 192.168.1.3:7400" in listed


@pytest.mark.usefixtures("network")
async def test_that_nothing_is_there_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    announced(monkeypatch)
    with pytest.raises(ValueError, match=r"no run announces itself .*\n    dtfm-node relay dtfm1"):
        await way_in("dtfm-node relay")


@pytest.mark.usefixtures("network")
async def test_on_a_terminal_the_invitation_is_asked_for_until_it_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announced(monkeypatch, HERE)
    typed = iter(["nonsense", INVITATION[:50], f" {INVITATION}\n"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(getpass, "getpass", lambda *_: next(typed))
    assert await way_in("dtfm-node join") == INVITATION
    assert "truncated" in capsys.readouterr().err


async def test_the_coordinator_that_was_used_last_is_not_looked_for_if_it_answers(
    monkeypatch: pytest.MonkeyPatch, network: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    remember()
    network["192.168.1.9:7400"] = PIN
    assert await way_in("dtfm-node join") == ""
    assert capsys.readouterr().err == ""


async def test_a_coordinator_that_has_moved_is_found_again_and_who_only_says_so_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, network: dict[str, bytes]
) -> None:
    remember()
    liar = Announcement("stories", "0.1", PIN, ("192.168.1.66:7400",))
    network.update({"192.168.1.66:7400": bytes(32), "192.168.1.2:7400": PIN})
    announced(monkeypatch, liar, HERE)
    assert await way_in("dtfm-node join") == "192.168.1.2:7400"
    announced(monkeypatch, liar, OTHER)
    assert await way_in("dtfm-node join") == ""  # it may come back where it was
