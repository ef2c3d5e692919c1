"""Tells the local network that there is a run, so that ``dtfm-node join`` finds it (see protos/local_network/announcement.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.service.addresses import public_addresses
from dtfm.protos.connection import read_address

if TYPE_CHECKING:  # it loads zeroconf
    from dtfm.protos.local_network.announcement import Announcement

Say = Callable[[int, str], None]
"""Logs a sentence at a level of the log."""

LOOK_SECONDS = 2.0
"""Seconds between two looks at this machine's addresses and at the run."""
TRY_AGAIN_SECONDS = 60.0
"""Seconds to wait after the network could not be told."""


@asynccontextmanager
async def announcing(
    ledger: Callable[[], Ledger], pin: bytes, listens: tuple[str, int], wished: bool | None, say: Say
) -> AsyncIterator[None]:
    """Tells the local network of a coordinator's run, until the block ends. ``listens``: its host and port. ``wished``: whether
    the operator wants it; None: yes, if the coordinator listens beyond loopback. ``say`` tells a person the result."""
    host, port = listens
    if wished is False:
        yield
        return
    if is_loopback(host):
        if wished:
            say(
                logging.WARNING,
                f"--announce: this coordinator listens on {host} alone, where no other machine reaches it, so nobody is told; to "
                f"let others in: --listen 0.0.0.0:{port}",
            )
        yield
        return
    if wished and not local_addresses(host, port):
        say(
            logging.WARNING,
            "--announce: runs are announced on private networks alone, and this machine is on none now.",
        )
    announcer = Announcer(lambda: announcement_of(ledger(), pin, local_addresses(host, port)), say)
    task = asyncio.create_task(announcer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@dataclass(frozen=True, slots=True)
class Announcer:
    """``announcement`` returns the present announcement, or None. ``say`` tells a person when the network first hears it, or
    why the network does not."""

    announcement: Callable[[], Announcement | None]
    say: Say
    look_seconds: float = LOOK_SECONDS
    try_again_seconds: float = TRY_AGAIN_SECONDS

    async def run(self) -> None:
        """Keeps the network informed, until it is cancelled."""
        told, problem = False, ""
        while True:
            now = None
            try:
                if (now := self.announcement()) is None:
                    await asyncio.sleep(self.look_seconds)
                    continue
                await self._tell(now, quiet=told)
                told, problem = True, ""
            except Exception as failed:  # the library lets through whatever sockets raise
                if str(failed) != problem:
                    problem = str(failed)
                    self.say(
                        logging.WARNING, f"The local network does not hear of this run: {problem}. The run goes on."
                    )
                if now is None:
                    await asyncio.sleep(self.try_again_seconds)
                else:
                    await self._while_same(now, self.try_again_seconds)

    async def _tell(self, now: Announcement, *, quiet: bool) -> None:
        """Announces the run until the announcement changes."""
        from dtfm.protos.local_network.announcement import fingerprint, service
        from dtfm.protos.local_network.multicast import multicast

        hosts = [read_address(address)[0] for address in now.addresses]
        async with multicast(hosts, lambda library: library) as opened:
            # Another that says the same may not keep this one from saying it, so nobody is asked whether the name is free.
            await opened.async_register_service(service(now), cooperating_responders=True)
            if not quiet:
                self.say(
                    logging.INFO,
                    f"Announced on the local network, for dtfm-node join without an invitation; the owner's fingerprint is "
                    f"{fingerprint(now.pin)} (serve --no-announce tells nobody).",
                )
            await self._while_same(now)

    async def _while_same(self, now: Announcement, most: float = float("inf")) -> None:
        """Waits until the announcement changes, at most ``most`` seconds."""
        waited = 0.0
        while waited < most and self.announcement() == now:
            await asyncio.sleep(self.look_seconds)
            waited += self.look_seconds


def is_loopback(host: str) -> bool:
    """Whether only its own machine reaches a server on ``host``."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def local_addresses(host: str, port: int) -> tuple[str, ...]:
    """HOST:PORT on local networks, of a coordinator that listens on ``host``."""
    from dtfm.protos.local_network.announcement import is_local

    return tuple(each for each in public_addresses(host, port, ()) if is_local(read_address(each)[0]))


def announcement_of(ledger: Ledger, pin: bytes, addresses: Sequence[str]) -> Announcement | None:
    """The announcement of the run. None: the run is over, or there is no local network."""
    from dtfm.protos.local_network.announcement import Announcement

    if ledger.outcome is not None or not addresses:
        return None
    return Announcement(str(ledger.run.get("name", "")), what_it_trains(ledger), pin, tuple(addresses))


def what_it_trains(ledger: Ledger) -> str:
    """The model in a few words, like "Qwen2-0.5B, 494M parameters". If it is a path or a URL, its last part alone."""
    model = ledger.run.get("model", {})
    pretrained, _, _ = str(model.get("pretrained", "")).partition("@")
    name = PurePosixPath(pretrained).name or str(model.get("family", ""))
    known = ledger.described
    if known is None:
        return name
    bytes_each = 8 if ledger.run.get("train", {}).get("precision") == "fp64" else 4
    return f"{name}, {_rounded(sum(layer.parameter_bytes for layer in known.workload.layers) / bytes_each)} parameters"


def _rounded(count: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"
