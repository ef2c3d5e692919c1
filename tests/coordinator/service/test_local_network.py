"""Whom a coordinator tells of its run, what it tells, and what becomes of it where nobody can be told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from zeroconf import ServiceInfo

from dtfm.coordinator.log.events import RunFinished, RunStarted
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.run import Described
from dtfm.coordinator.service import addresses
from dtfm.coordinator.service.local_network import Announcer, announcement_of, announcing, what_it_trains
from dtfm.protos.local_network import multicast as module
from dtfm.protos.local_network.announcement import Announcement, service
from dtfm.scheduler.model.workload import Layer, Workload
from tests.coordinator.script import run_table

PIN = bytes(range(32))
HERE = ("192.168.1.2:7400",)
RUN = {**run_table(), "name": "stories", "model": {"family": "llama"}}
LEDGER = fold([RunStarted("1", RUN)])


class Network:
    """A network that records announcements (``told``) and sentences for the operator (``said``) in queues."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[list[str], ServiceInfo]] = asyncio.Queue()
        self.said: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.problem: Exception | None = None
        self.is_open = 0
        self.closed = asyncio.Event()

    def say(self, level: int, sentence: str) -> None:
        self.said.put_nowait((level, sentence))

    @asynccontextmanager
    async def multicast(self, hosts: Sequence[str], *_: object) -> AsyncIterator[Network]:
        if self.problem is not None:
            raise self.problem
        self.hosts, self.is_open = list(hosts), self.is_open + 1
        try:
            yield self
        finally:
            self.is_open -= 1
            self.closed.set()

    async def async_register_service(self, info: ServiceInfo, **_: object) -> None:
        self.told.put_nowait((self.hosts, info))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(module, "multicast", network.multicast)
    monkeypatch.setattr(addresses, "own_hosts", lambda: ["8.8.4.4", "192.168.1.2", "100.64.0.3"])
    return network


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("wished", [None, False, True])
async def test_who_listens_on_loopback_alone_tells_nobody(network: Network, host: str, wished: bool | None) -> None:
    async with announcing(lambda: LEDGER, PIN, (host, 7400), wished, network.say):
        await asyncio.sleep(0)
    assert network.told.empty()
    if wished:
        level, sentence = network.said.get_nowait()
        assert level == logging.WARNING
        assert "to let others in: --listen 0.0.0.0:7400" in sentence
    assert network.said.empty()


async def test_who_does_not_want_it_tells_nobody(network: Network) -> None:
    async with announcing(lambda: LEDGER, PIN, ("0.0.0.0", 7400), False, network.say):
        await asyncio.sleep(0)
    assert network.told.empty()


@pytest.mark.parametrize("wished", [None, True])
async def test_local_networks_alone_are_told_and_the_operator_of_that(network: Network, wished: bool | None) -> None:
    async with announcing(lambda: LEDGER, PIN, ("0.0.0.0", 7400), wished, network.say):
        hosts, info = await asyncio.wait_for(network.told.get(), 20)
        level, sentence = await asyncio.wait_for(network.said.get(), 20)
    assert hosts == ["192.168.1.2"]
    assert (info.port, info.parsed_addresses()) == (7400, ["192.168.1.2"])
    assert level == logging.INFO
    assert "the owner's fingerprint is 0001 0203 0405 0607 (serve --no-announce" in sentence
    assert network.is_open == 0


@pytest.mark.parametrize("host", ["8.8.4.4", "100.64.0.3", "run.example.org"])
async def test_a_public_address_is_not_announced(network: Network, host: str) -> None:
    async with announcing(lambda: LEDGER, PIN, (host, 7400), True, network.say):
        _, sentence = await asyncio.wait_for(network.said.get(), 20)
    assert "on private networks alone, and this machine is on none now" in sentence
    assert network.told.empty()


async def test_without_multicast_one_line_says_so_until_there_is_some(network: Network) -> None:
    network.problem = OSError("none of its interfaces passes multicast on")
    announcer = Announcer(lambda: Announcement("stories", "", PIN, HERE), network.say, 0.001, 0.002)
    task = asyncio.create_task(announcer.run())
    level, sentence = await asyncio.wait_for(network.said.get(), 20)
    assert level == logging.WARNING
    assert sentence == (
        "The local network does not hear of this run: none of its interfaces passes multicast on. The run goes on."
    )
    network.problem = None
    await asyncio.wait_for(network.told.get(), 20)
    assert "Announced" in (await asyncio.wait_for(network.said.get(), 20))[1]
    assert network.said.empty()
    task.cancel()


async def test_what_changes_is_told_again_and_a_run_that_is_over_no_more(network: Network) -> None:
    now: list[Announcement | None] = [Announcement("stories", "", PIN, HERE)]
    announcer = Announcer(lambda: now[0], network.say, 0.001, 0.002)
    task = asyncio.create_task(announcer.run())
    await asyncio.wait_for(network.told.get(), 20)
    moved = Announcement("stories", "", PIN, ("192.168.1.9:7400",))
    now[0] = moved
    hosts, info = await asyncio.wait_for(network.told.get(), 20)
    assert (hosts, info.parsed_addresses()) == (["192.168.1.9"], ["192.168.1.9"])
    network.closed.clear()
    now[0] = None
    await asyncio.wait_for(network.closed.wait(), 20)
    assert network.is_open == 0
    now[0] = moved
    await asyncio.wait_for(network.told.get(), 20)
    assert network.said.qsize() == 1
    task.cancel()


def test_what_is_told() -> None:
    announcement = announcement_of(LEDGER, PIN, HERE)
    assert announcement is not None
    assert announcement == Announcement("stories", "llama", PIN, HERE)
    assert set(service(announcement).properties) == {b"run", b"trains", b"authority"}
    assert announcement_of(LEDGER, PIN, ()) is None
    over = fold([RunStarted("1", RUN), RunFinished(10, "the run is complete")])
    assert announcement_of(over, PIN, HERE) is None


def test_what_a_run_trains_is_said_in_a_few_words_without_paths() -> None:
    def trains(ledger: Ledger, **model: str) -> str:
        return what_it_trains(replace(ledger, run={**ledger.run, "model": model}))

    assert trains(LEDGER, family="gpt2") == "gpt2"
    assert trains(LEDGER, pretrained="Qwen/Qwen2-0.5B@abc", family="") == "Qwen2-0.5B"
    assert trains(LEDGER, pretrained="/home/ada/secret-client/model", family="") == "model"
    layers = tuple(Layer(f"{n}", 1.0, 4 * 250e6, 1.0) for n in range(2))
    described = replace(LEDGER, described=Described(Workload(layers, 1), "", 1, 1, 1.0, 1, 1))
    assert trains(described, family="llama") == "llama, 500M parameters"
