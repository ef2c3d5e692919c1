"""Finds runs on the local network, and a coordinator that has a new address there.

Answers are not believed (see protos/local_network/announcement.py), and are limited in number and in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dtfm.node.network.addresses import interfaces
from dtfm.protos.connection import read_address
from dtfm.protos.identity.credentials import fetch_authority
from dtfm.protos.identity.enrolment import Entry, NotAdmitted, Opened
from dtfm.protos.identity.proof import ClockError
from dtfm.protos.local_network.announcement import SERVICE, Announcement, Found, announced_in, is_local
from dtfm.protos.local_network.multicast import multicast

log = logging.getLogger(__name__)

LOOK_SECONDS = 3.0
ASK_AFTER = (0.0, 1.0, 1.0)
"""Seconds before each question. A question may be lost, and a coordinator repeats an answer after a second at the earliest (RFC
6762, section 6)."""
ANSWER_SECONDS = 3.0
"""The longest wait for a certificate at an address that was announced."""
MOST_INTERFACES = 16
"""The number of this machine's addresses that ask."""
MOST_PLACES, MOST_OTHERS = 32, 8
"""The most addresses that one look tries for one coordinator: senders of answers, and others that answers named."""
PAUSE_SECONDS, MOST_PAUSE_SECONDS = 2.0, 30.0
"""Pauses between two looks for a coordinator that does not answer. Each is twice as long as the one before."""
_PTR, _IN = 12, 1


async def look_around(heard: Callable[[Announcement], None], seconds: float = LOOK_SECONDS) -> None:
    """Asks the local networks for runs, and calls ``heard`` with each answer that comes within ``seconds``. The same answer may
    come several times. Raises OSError if this machine is on no local network, or cannot ask."""
    from zeroconf import DNSOutgoing, DNSQuestion

    def read(packet: bytes, source: str) -> None:
        for announcement in announced_in(packet, source):
            heard(announcement)

    hosts = list(dict.fromkeys(each.address for each in interfaces() if is_local(each.address)))[:MOST_INTERFACES]
    if not hosts:
        raise OSError("this machine has no address on a local network")
    async with multicast(hosts, lambda _: read) as opened:
        question = DNSOutgoing(0)
        question.add_question(DNSQuestion(SERVICE, _PTR, _IN))
        ends = asyncio.get_running_loop().time() + seconds
        for pause in ASK_AFTER:
            await asyncio.sleep(pause)
            opened.zeroconf.async_send(question)
        await asyncio.sleep(ends - asyncio.get_running_loop().time())


async def runs_here(seconds: float = LOOK_SECONDS) -> tuple[list[Announcement], int]:
    """The runs on the local network whose authority answers at the announced address, and how many others there seem to be.
    Raises OSError as `look_around` does."""
    found = Found()
    await look_around(found.take, seconds)
    heard = list(found.heard.values())
    answers = await asyncio.gather(*(_answers(each.addresses[0], each.pin) for each in heard))
    runs: dict[bytes, Announcement] = {}
    for each in (each for each, there in zip(heard, answers, strict=True) if there):
        known = runs.setdefault(each.pin, replace(each, addresses=()))  # it may have several interfaces
        runs[each.pin] = replace(known, addresses=(*known.addresses, each.addresses[0]))
    return sorted(runs.values(), key=lambda run: (run.run, run.pin)), answers.count(False) + found.are_more


async def find_again(pin: bytes, seconds: float = LOOK_SECONDS) -> str:
    """Returns HOST:PORT where the authority with this ``pin`` answers on the local network; empty if it does not."""
    there: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    tries: dict[str, asyncio.Task[None]] = {}
    others = 0

    def heard(announcement: Announcement) -> None:
        nonlocal others
        if announcement.pin != pin:
            return
        for number, address in enumerate(announcement.addresses):
            room = others < MOST_OTHERS if number else len(tries) - others < MOST_PLACES
            if address not in tries and room:
                others += number > 0
                tries[address] = asyncio.create_task(attempt(address))

    async def attempt(address: str) -> None:
        if await _answers(address, pin) and not there.done():
            there.set_result(address)

    looking = asyncio.create_task(look_around(heard, seconds))
    pending: set[asyncio.Future[Any]] = {looking}
    try:
        while pending and not there.done():
            await asyncio.wait({*pending, there}, return_when=asyncio.FIRST_COMPLETED)
            pending = {task for task in (looking, *tries.values()) if not task.done()}
        return there.result() if there.done() else ""
    finally:
        tasks = [looking, *tries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if not looking.cancelled() and (problem := looking.exception()) is not None:
            log.debug("the local network cannot be asked where the coordinator is: %s", problem)


async def _answers(address: str, pin: bytes) -> bool:
    """Whether the authority with this ``pin`` shows its certificate there. Nothing is sent."""
    try:
        await fetch_authority([address], pin, ANSWER_SECONDS)
    except ClockError:
        return True  # it is there; connecting names the problem
    except (ConnectionError, PermissionError):
        return False
    return True


def was_local(addresses: Iterable[str]) -> bool:
    """Whether a coordinator at one of these addresses (HOST:PORT) is, or was, on a local network."""
    hosts = [read_address(address)[0].lower() for address in addresses]
    return any(is_local(host) or host.endswith(".local") for host in hosts)


async def follow(coordinator: Entry) -> bool:
    """Looks once for a coordinator that does not answer at its old address, if that was on a local network. Returns whether it
    is found elsewhere. ``coordinator`` leads there from then on."""
    addresses, pin = coordinator.leads_to
    if pin is None or not was_local(addresses):
        return False
    address = await find_again(pin)
    if not address or address in addresses:
        return False
    log.warning("The coordinator has moved to %s: it announces itself there, and has shown its key.", address)
    coordinator.has_moved(address)
    return True


async def open_there(coordinator: Entry, lease: float, may_follow: bool) -> Opened:
    """Opens the way to a coordinator. Before it refuses another authority it looks for the coordinator elsewhere, if it
    ``may_follow``. Raises ConnectionError and NotAdmitted."""
    try:
        return await coordinator.open(lease)
    except NotAdmitted as refused:
        if refused.reason != "WRONG_AUTHORITY" or not may_follow or not await follow(coordinator):
            raise
    return await coordinator.open(lease)


class Search:
    """Looks for a coordinator again and again, from ``begin`` until it is found or until ``end``. ``found`` is set when it is."""

    def __init__(self, coordinator: Entry) -> None:
        self.found = asyncio.Event()
        self._coordinator = coordinator
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Does nothing if it has begun already."""
        if self._task is None or self._task.done():
            self.found.clear()
            self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Does nothing if it has not begun."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        pause = PAUSE_SECONDS
        while not await follow(self._coordinator):
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)
        self.found.set()
