"""Tells the local network that there is a run, so that ``dtfm-node join`` finds it (see protos/announcement.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from ipaddress import ip_address

from zeroconf import IPVersion, ServiceInfo
from zeroconf.asyncio import AsyncZeroconf

import dtfm
from dtfm.coordinator.service.addresses import public_addresses
from dtfm.protos.announcement import SERVICE, write_txt
from dtfm.protos.connection import read_address

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
"""Most time for taking the announcement back."""


@contextlib.asynccontextmanager
async def announcing(run: str, pin: bytes, host: str, port: int) -> AsyncIterator[None]:
    """Announces, meanwhile, a coordinator that listens on ``host``: on and with private addresses alone, as on a public one
    anybody could have it answer forged senders. One without them, or on loopback, announces nothing. Where there is no
    multicast, it is a warning in the log and no more."""
    hosts = [host for host, _ in map(read_address, public_addresses(host, port, ())) if _is_private(host)]
    if not hosts:
        yield
        return
    end = asyncio.Event()
    task = asyncio.create_task(_announce(service(run, pin, hosts, port), hosts, end))
    try:
        yield
    finally:
        end.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(task, PATIENCE_SECONDS)


def _is_private(host: str) -> bool:
    """Whether it is an address of a house or a firm; those of a provider with its customers (RFC 6598) are not."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name
    return address.is_private and not address.is_loopback


def service(run: str, pin: bytes, hosts: list[str], port: int) -> ServiceInfo:
    name = f"dtfm-{pin.hex()[:16]}"
    return ServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=port,
        properties=write_txt(run, dtfm.__version__, pin),
        server=f"{name}.local.",
        parsed_addresses=hosts,
    )


async def _announce(info: ServiceInfo, hosts: list[str], end: asyncio.Event) -> None:
    version = IPVersion.All if any(":" in host for host in hosts) else IPVersion.V4Only
    try:
        zeroconf = AsyncZeroconf(interfaces=hosts, ip_version=version)
        try:
            await zeroconf.async_register_service(info, allow_name_change=True)
            await end.wait()
        finally:
            await zeroconf.async_close()  # says goodbye
    except Exception as problem:  # its library lets through whatever sockets raise
        log.warning("the local network does not hear of this run: %s", problem)
