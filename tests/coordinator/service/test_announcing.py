"""Whom a coordinator tells of its run, and what becomes of it where nobody can be told."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dtfm.coordinator.service import addresses, announcing as module
from dtfm.coordinator.service.announcing import announcing, service

PIN = bytes(range(32))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Whether anybody was to be told; there is no multicast."""
    tried = asyncio.Event()

    def none(**_: object) -> None:
        tried.set()
        raise OSError("no multicast here")

    monkeypatch.setattr(module, "AsyncZeroconf", none)
    return tried


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_who_listens_on_loopback_alone_tells_nobody(told: asyncio.Event, host: str) -> None:
    async with announcing("stories", PIN, host, 7400):
        await asyncio.sleep(0)
    assert not told.is_set()


async def test_on_public_addresses_nobody_is_told(told: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def none(*, interfaces: list[str], **_: object) -> None:
        asked.append(interfaces)
        told.set()
        raise OSError("no multicast here")

    monkeypatch.setattr(module, "AsyncZeroconf", none)
    monkeypatch.setattr(addresses, "own_hosts", lambda: ["8.8.4.4", "100.64.0.3", "2600::1"])
    async with announcing("stories", PIN, "::", 7400):
        await asyncio.sleep(0)
    assert not asked
    monkeypatch.setattr(addresses, "own_hosts", lambda: ["8.8.4.4", "10.0.0.3", "2600::1", "fd00::2"])
    async with announcing("stories", PIN, "::", 7400):
        await asyncio.wait_for(told.wait(), 10)
    assert asked == [["10.0.0.3", "fd00::2"]]


async def test_where_there_is_no_multicast_the_run_goes_on(
    told: asyncio.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with announcing("stories", PIN, "192.168.1.2", 7400):
            await asyncio.wait_for(told.wait(), 10)
    assert "the local network does not hear of this run: no multicast here" in caplog.text


def test_nothing_but_the_run_the_version_and_the_authority_is_told() -> None:
    told = service("stories", PIN, ["192.168.1.2", "fd00::2"], 7400)
    assert set(told.properties) == {b"run", b"version", b"authority"}
    assert (told.port, told.parsed_addresses()) == (7400, ["192.168.1.2", "fd00::2"])
