"""A port at the home router, with a router that answers as the test says."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dtfm.node.network import home_router
from dtfm.node.network.home_router import LIFETIME_SECONDS, HomeRouter


class Router:
    """Answers as miniupnpc.UPnP does."""

    lanaddr = "192.168.1.20"

    def __init__(self, public: str = "198.51.100.1", *, there: bool = True, willing: bool = True) -> None:
        self.public = public
        self.there = there
        self.willing = willing
        self.ports: dict[int, tuple[str, int, int]] = {}
        self.silence: threading.Event | None = None

    def discover(self) -> int:
        if self.silence is not None:
            self.silence.wait(10)
        return int(self.there)

    def selectigd(self) -> None:
        pass

    def externalipaddress(self) -> str:
        return self.public

    def addportmapping(self, port: int, _tcp: str, host: str, inside: int, _name: str, _who: str, seconds: int) -> bool:
        if self.willing:
            self.ports[port] = (host, inside, seconds)
        return self.willing

    def deleteportmapping(self, port: int, _tcp: str) -> bool:
        return self.ports.pop(port, None) is not None


async def test_the_port_is_open_for_a_bounded_time_and_closed_at_the_end() -> None:
    router = Router()
    home = HomeRouter(lambda: router)
    assert await home.open(7401) == "198.51.100.1:7401"
    assert router.ports == {7401: ("192.168.1.20", 7401, LIFETIME_SECONDS)}
    await home.close()
    assert router.ports == {}


async def test_it_stays_open_while_the_node_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_router, "LIFETIME_SECONDS", 0.02)
    router, renewed = Router(), asyncio.Event()
    home, loop, add = HomeRouter(lambda: router), asyncio.get_running_loop(), router.addportmapping

    def count(*arguments: object) -> bool:
        if router.ports:
            loop.call_soon_threadsafe(renewed.set)
        return add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(router, "addportmapping", count)
    await home.open(7401)
    await asyncio.wait_for(renewed.wait(), 5)
    await home.close()


@pytest.mark.parametrize(
    "router",
    [Router(there=False), Router(willing=False), Router("10.64.0.1"), Router("100.64.7.7"), Router("")],
    ids=["none", "refuses", "private", "provider's NAT", "no address"],
)
async def test_without_a_router_that_helps_there_is_no_candidate(router: Router) -> None:
    home = HomeRouter(lambda: router)
    assert await home.open(7401) == ""
    await home.close()
    assert router.ports == {}


async def test_a_router_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_router, "PATIENCE_SECONDS", 0.05)
    router = Router()
    router.silence = threading.Event()
    home = HomeRouter(lambda: router)
    assert await home.open(7401) == ""
    router.silence.set()
    await home.close()


async def test_without_the_package_there_is_no_candidate() -> None:
    def missing() -> Router:
        raise ImportError("No module named 'miniupnpc'")

    assert await HomeRouter(missing).open(7401) == ""
