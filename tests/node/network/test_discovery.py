"""A coordinator that has moved is found again, and nobody else is believed to be it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest

from dtfm.node.network import discovery
from dtfm.node.network.discovery import (
    MOST_OTHERS,
    MOST_PLACES,
    Search,
    find_again,
    follow,
    look_around,
    runs_here,
    was_local,
)
from dtfm.protos.connection import server_options
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.credentials import coordinator_credentials, make_authority, make_key, pin_of
from dtfm.protos.identity.enrolment import Entry
from dtfm.protos.identity.invitation import Invitation
from dtfm.protos.local_network.announcement import Announcement
from tests.protos.members import NOW

Heard = Callable[[Announcement], None]
AUTHORITY, OTHER = make_authority(make_key(), NOW), make_authority(make_key(), NOW)
PIN = pin_of(AUTHORITY.certificate)


@pytest.fixture
async def there() -> AsyncIterator[str]:
    """Where the coordinator is."""
    server = grpc.aio.server(options=server_options())
    port = server.add_secure_port("127.0.0.1:0", coordinator_credentials(AUTHORITY))
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def impostor() -> AsyncIterator[str]:
    """Where somebody else says that the coordinator is."""
    server = grpc.aio.server(options=server_options())
    port = server.add_secure_port("127.0.0.1:0", coordinator_credentials(OTHER))
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def announced(monkeypatch: pytest.MonkeyPatch, *announcements: Announcement, ends: bool = True) -> None:
    """What is heard at each look."""

    async def look(heard: Heard, seconds: float = 0.0) -> None:
        for announcement in announcements:
            heard(announcement)
        if not ends:
            await asyncio.Event().wait()

    monkeypatch.setattr(discovery, "look_around", look)


def at(*addresses: str, pin: bytes = PIN) -> Announcement:
    return Announcement("stories", "", pin, addresses)


async def test_the_authority_is_found_before_the_look_has_ended(monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    announced(monkeypatch, at("127.0.0.1:1"), at(there), ends=False)
    assert await find_again(PIN) == there


async def test_whoever_only_says_so_is_not_believed(monkeypatch: pytest.MonkeyPatch, there: str, impostor: str) -> None:
    announced(monkeypatch, at(impostor), at(there, pin=pin_of(OTHER.certificate)))
    assert await find_again(PIN) == ""
    announced(monkeypatch, *(at(f"127.0.0.1:{port}", pin=bytes(32)) for port in range(1, 10_001)), at(impostor, there))
    assert await find_again(PIN) == there


async def test_of_ten_thousand_answers_few_are_tried_and_each_once(monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    tried: list[str] = []

    async def answers(address: str, pin: bytes) -> bool:
        tried.append(address)
        return address == there

    monkeypatch.setattr(discovery, "_answers", answers)
    # One liar, who names others with each answer, but answers from one address.
    lies = [at("192.168.1.66:7400", f"10.0.{n // 250}.{n % 250}:7400") for n in range(10_000)]
    announced(monkeypatch, *lies, at(there), *lies)
    assert await find_again(PIN) == there
    assert len(tried) == len(set(tried)) == 2 + MOST_OTHERS
    tried.clear()
    announced(monkeypatch, *(at(f"10.0.{n // 250}.{n % 250}:7400") for n in range(10_000)))
    assert await find_again(PIN) == ""
    assert len(tried) == MOST_PLACES


async def test_runs_are_listed_that_answer_where_they_are_announced(
    monkeypatch: pytest.MonkeyPatch, there: str, impostor: str
) -> None:
    other = pin_of(OTHER.certificate)
    lies = [at(impostor, there), Announcement("", "", other, (there, impostor))]
    announced(monkeypatch, *lies, at(there), at(impostor, pin=other), at(there, "192.168.1.66:7400"))
    runs, others = await runs_here()
    # All are on one machine here: the first words of each authority count, and these are lies.
    assert (runs, others) == ([], 2)
    announced(monkeypatch, at(there, "192.168.1.66:7400"), at(impostor, pin=other), at("127.0.0.2:1"))
    runs, others = await runs_here()
    assert (runs, others) == (sorted([at(there), at(impostor, pin=other)], key=lambda run: run.pin), 1)


async def test_where_nobody_can_be_asked_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "interfaces", list)
    with pytest.raises(OSError, match="no address on a local network"):
        await look_around(lambda _: None)
    assert await find_again(PIN) == ""


def entry(monkeypatch: pytest.MonkeyPatch, folder: Path, address: str) -> Entry:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return Entry(str(Invitation((address,), PIN, "00" * 6, bytes(32))), [Role.NODE], "a")


async def test_a_search_ends_with_the_coordinator_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = entry(monkeypatch, tmp_path, "192.168.1.2:7400")
    announced(monkeypatch, at(there))
    search = Search(coordinator)
    with caplog.at_level(logging.WARNING):
        search.begin()
        search.begin()
        await asyncio.wait_for(search.found.wait(), 20)
    assert coordinator.leads_to[0] == (there, "192.168.1.2:7400")
    assert caplog.messages == [
        f"The coordinator has moved to {there}: it announces itself there, and has shown its key."
    ]
    await search.end()


async def test_a_coordinator_that_is_where_it_was_has_not_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str
) -> None:
    coordinator = entry(monkeypatch, tmp_path, "192.168.1.2:7400")
    coordinator.has_moved(there)
    announced(monkeypatch, at(there))
    assert not await follow(coordinator)


async def test_a_coordinator_elsewhere_is_not_looked_for_on_this_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str
) -> None:
    announced(monkeypatch, at(there))
    assert not await follow(entry(monkeypatch, tmp_path, "203.0.113.1:7400"))
    assert not await follow(Entry("192.168.1.2:7400", [Role.NODE], "a"))  # whose authority is not known yet


def test_local_are_private_addresses_and_names_of_the_local_network() -> None:
    assert was_local(["203.0.113.1:7400", "192.168.1.2:7400"])
    assert was_local(["box.local:7400"])
    assert not was_local(["127.0.0.1:7400", "run.example.org:7400", "100.64.0.2:7400"])
