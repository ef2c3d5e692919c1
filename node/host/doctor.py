"""What would stop this machine from taking part in a run, and how to fix it."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dtfm.node.host.device import measure_device, open_device
from dtfm.protos.access import Role
from dtfm.protos.connection import read_address
from dtfm.protos.credentials import fetch_authority, shown_certificate
from dtfm.protos.enrolment import Entry
from dtfm.protos.proof import ClockError

NEEDED = ("torch", "transformers", "safetensors", "grpcio")
LEAST_DISK_BYTES = 1 << 30
LEAST_TCP_BUFFER_BYTES = 16 << 20
"""A stream fills 1 Gbit/s over 100 ms only with about this many bytes in flight."""
ANSWER_SECONDS = 5.0
"""Most seconds to wait for the coordinator."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``good`` is False if a node will not work, None if it works less well than it could. ``fix`` may be empty."""

    check: str
    good: bool | None
    finding: str
    fix: str = ""


async def examine(coordinator: str, listen: str, device: str) -> list[Finding]:
    """All findings, in the order in which to fix them. An empty ``coordinator`` is not asked."""
    findings = [check_packages(), check_device(device), check_disk(), check_listen(listen)]
    findings += [check_tcp_buffers(), check_tcp_pauses()]
    if coordinator:
        findings.append(await check_coordinator(coordinator))
    return findings


def check_packages() -> Finding:
    found = []
    for name in NEEDED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            return Finding("packages", False, f"{name} is not installed", "pip install 'dtfm[node]'")
    return Finding("packages", True, ", ".join(found))


def check_device(name: str) -> Finding:
    try:
        device = measure_device(open_device(name))
    except ValueError as mistake:
        return Finding("device", False, str(mistake), "choose another with --device, or repair the driver")
    sentence = (
        f"{device.name} ({device.kind}), {device.memory_bytes / 2**30:.1f} GiB free, {device.flops / 1e9:.0f} GFLOP/s in "
        "matrix products"
    )
    if device.kind == "cpu":
        return Finding("device", None, sentence, "a GPU computes far faster: nvidia-smi shows whether there is one")
    return Finding("device", True, sentence)


def check_disk(free: Callable[[], int] = lambda: shutil.disk_usage(Path.cwd()).free) -> Finding:
    left = free()
    if left < LEAST_DISK_BYTES:
        return Finding(
            "disk", False, f"{left / 2**30:.1f} GiB free", "tokenized data and snapshots need space: free some"
        )
    return Finding("disk", True, f"{left / 2**30:.0f} GiB free")


def check_listen(listen: str) -> Finding:
    try:
        host, port = read_address(listen)
        with socket.create_server((host, port)):
            return Finding("listen", True, f"{listen} is free")
    except (ValueError, OSError) as error:
        return Finding("listen", False, f"{listen}: {error}", "give a free port with --listen HOST:PORT")


def read_setting(path: str) -> str:
    return Path(path).read_text()


def check_tcp_buffers(read: Callable[[str], str] = read_setting) -> Finding:
    """How many bytes Linux lets a connection have in flight, whatever the link."""
    paths = {"rmem": "/proc/sys/net/ipv4/tcp_rmem", "wmem": "/proc/sys/net/ipv4/tcp_wmem"}
    try:
        most = {name: int(read(path).split()[2]) for name, path in paths.items()}
    except (OSError, IndexError, ValueError):
        return Finding("tcp buffers", None, "unknown on this system", "nothing to do on a fast local network")
    smallest = min(most.values())
    if smallest >= LEAST_TCP_BUFFER_BYTES:
        return Finding("tcp buffers", True, f"up to {smallest >> 20} MiB")
    wanted = f"4096 131072 {LEAST_TCP_BUFFER_BYTES}"
    return Finding(
        "tcp buffers",
        None,
        f"at most {smallest / 2**20:.1f} MiB: a stream over 100 ms gets at most {smallest * 8 / 0.1 / 1e6:.0f} Mbit/s",
        f'sysctl -w net.ipv4.tcp_rmem="{wanted}" net.ipv4.tcp_wmem="{wanted}"',
    )


def check_tcp_pauses(read: Callable[[str], str] = read_setting) -> Finding:
    """Whether TCP starts slowly again after a pause longer than its retransmission timeout (0.2 s or more), as links pause in
    every step. Linux does so by default, except with BBR."""
    try:
        control = read("/proc/sys/net/ipv4/tcp_congestion_control").strip()
        slow = read("/proc/sys/net/ipv4/tcp_slow_start_after_idle").strip() != "0"
    except OSError:
        return Finding("tcp pauses", None, "unknown on this system", "nothing to do on a fast local network")
    if control.startswith("bbr") or not slow:
        return Finding("tcp pauses", True, f"a connection keeps its speed after a pause ({control})")
    return Finding(
        "tcp pauses",
        None,
        f"under {control} a connection starts slowly again after a pause: over far links each step takes longer",
        "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 (with Docker, run the container with --sysctl and that)",
    )


async def check_coordinator(where: str) -> Finding:
    """Whether the coordinator answers, and as who it should be. No invitation is used up."""
    try:
        entry = Entry(where, [Role.NODE], "")
        addresses, pin = entry.leads_to
        for address in addresses:
            host, port = read_address(address)
            await asyncio.get_running_loop().getaddrinfo(host, port)
    except ValueError as mistake:
        return Finding("coordinator", False, str(mistake), "give an invitation, as `dtfm-coordinator invite` prints it")
    except OSError as error:
        return Finding(
            "coordinator", False, f"{host} is not a known host: {error}", "check the name, or give its IP address"
        )
    fix = (
        f"is `dtfm-coordinator serve --listen 0.0.0.0:{port}` running there, and TCP port {port} open in its firewall?"
    )
    try:
        if pin is None:
            await shown_certificate(addresses[0], ANSWER_SECONDS)
            return Finding("coordinator", True, f"{addresses[0]} answers")
        address, _ = await fetch_authority(addresses, pin, ANSWER_SECONDS)
    except ConnectionError as error:
        return Finding("coordinator", False, f"{' or '.join(addresses)}: {error}", fix)
    except (PermissionError, ClockError) as error:
        return Finding("coordinator", False, str(error), "ask for a new invitation, or set the clock")
    return Finding("coordinator", True, f"{address} answers, and is the one that the invitation names")
