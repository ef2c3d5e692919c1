"""What would stop this machine from taking part in a run, and how to fix it: gathers the facts that findings.py judges."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dtfm.node.doctor import findings
from dtfm.node.doctor.findings import Finding
from dtfm.node.doctor.wish import Wish
from dtfm.node.host.disk_speed import measure_disk
from dtfm.node.host.driver import has_nvidia_gpu, judge, nvidia_driver
from dtfm.node.host.packages import EXTRA, missing_packages
from dtfm.node.network.addresses import candidates, host_of
from dtfm.node.network.home_router import HomeRouter
from dtfm.protos.connection import read_address
from dtfm.protos.identity.enrolment import Entry, NotAdmitted
from dtfm.protos.identity.private_files import NAME_A_STATE_FOLDER, state_folder
from dtfm.protos.open_files import raise_limit

ANSWER_SECONDS = 5.0
"""Most seconds to wait for the coordinator."""
DISK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node would be. ``facing`` is this machine's address that faces the coordinator; empty: no coordinator was given.
    ``snapshots`` is the folder for its part of the run's state."""

    listen: str
    device: str
    snapshots: Path
    advertise: tuple[str, ...] = ()
    facing: str = ""
    behind_nat: bool = False


async def examine(coordinator: Entry | None, place: Place, wish: Wish | None = None) -> list[Finding]:
    """All findings, in the order of fixing them. Without ``coordinator`` none is asked. No invitation is used up. ``wish``: how
    a node would join; None: as before."""
    missing = missing_packages()
    versions = {}
    for name in EXTRA:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    extra = "gpu" if has_nvidia_gpu() else "node"
    found = [await asyncio.to_thread(look_at_state_folder), findings.on_packages(missing, versions, extra)]
    if "torch" not in missing:
        found += await asyncio.to_thread(look_at_device, place.device)
    found += [await asyncio.to_thread(look_at_disk, place.snapshots), findings.on_open_files(raise_limit())]
    if coordinator is not None:
        found.append(await look_at_coordinator(coordinator))
        if found[-1].good and not missing:
            from dtfm.node.doctor.dry_join import dry_join

            found += await dry_join(coordinator, wish or Wish(place.device))
    return [*found, *await look_at_port(place), *look_at_tcp()]


def look_at_device(name: str) -> list[Finding]:
    import torch

    from dtfm.node.host.device import measure_device, open_device

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver = judge(nvidia_driver(), has_nvidia_gpu(), torch.__version__, torch.version.cuda, gpus)
    found = [Finding("driver", *driver)]
    try:
        device = measure_device(open_device(name))
    except (ValueError, RuntimeError) as mistake:
        fix = "choose another with --device, or repair the driver"
        return [*found, Finding("device", False, str(mistake), fix)]
    sentence = (
        f"{device.name} ({device.kind}), {device.memory_bytes / 2**30:.1f} GiB free, {device.flops / 1e9:.0f} GFLOP/s in "
        "matrix products"
    )
    return [*found, findings.on_device(device.kind, sentence)]


def look_at_state_folder() -> Finding:
    """Whether this user's key and names can be kept."""
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return Finding("state", False, f"{folder} cannot be written: {error.strerror}", NAME_A_STATE_FOLDER)
    return Finding("state", True, f"this node's key and name are kept in {folder}")


def look_at_disk(folder: Path) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        size = min(DISK_BYTES, free // 2)
        return findings.on_disk(str(folder), free, measure_disk(folder, size)[0] if size >= DISK_BYTES else None)
    except OSError as error:
        return findings.on_disk(str(folder), 0, None, error.strerror or str(error))


def look_at_tcp(folder: Path = Path("/proc/sys/net/ipv4")) -> list[Finding]:
    """Checks Linux's settings. On other systems they are not known."""

    def setting(name: str) -> str:
        try:
            return (folder / name).read_text().strip()
        except OSError:
            return ""

    buffers: dict[str, int] | None = None
    control = setting("tcp_congestion_control")
    with suppress(IndexError, ValueError):
        buffers = {name: int(setting(name).split()[2]) for name in ("tcp_rmem", "tcp_wmem")}
    return [
        findings.on_tcp_buffers(buffers),
        findings.on_congestion_control(control, setting("tcp_available_congestion_control").split()),
        findings.on_pauses(control, setting("tcp_slow_start_after_idle") != "0"),
    ]


async def look_at_coordinator(entry: Entry) -> Finding:
    """Whether the coordinator answers, and with the right identity."""
    addresses, pin = entry.leads_to
    try:
        address, _, _ = await entry.answering(ANSWER_SECONDS)
    except ConnectionError as error:
        ports = " or ".join(dict.fromkeys(str(read_address(each)[1]) for each in addresses))
        fix = (
            f"is this the right address, `dtfm-coordinator serve --listen 0.0.0.0:{ports}` running there, and TCP port {ports} "
            "open in its firewall?"
        )
        return Finding("coordinator", False, f"{' or '.join(addresses)}: {error}", fix)
    except NotAdmitted as refused:
        if refused.reason == "WRONG_CLOCK":
            return Finding("clock", False, refused.sentence, "timedatectl set-ntp true")
        return Finding("coordinator", False, refused.sentence, "ask for a new invitation")
    named = ", and is the one that was named" if pin is not None else ""
    return Finding("coordinator", True, f"{address} answers{named}")


async def look_at_port(place: Place) -> list[Finding]:
    """Whether the port is free, and whether others can dial this machine as far as it can tell by itself. Raises ValueError for
    addresses in ``place`` that no node may have."""
    router, opened = HomeRouter(), ""
    try:
        with _listen(*read_address(place.listen)) as listening:
            port = int(listening.getsockname()[1])
    except OSError as error:
        why = error.strerror or str(error)
        return [Finding("listen", False, f"{place.listen}: {why}", "give a free port with --listen HOST:PORT")]
    if place.behind_nat:
        opened = await router.open(port)
    addresses = candidates(host_of(place.listen), port, place.advertise, place.facing, opened)
    await router.close()
    found = [Finding("listen", True, f"{place.listen} is free")]
    if place.facing:
        found.append(findings.on_being_behind_nat(place.facing, addresses, place.behind_nat))
    return found


def _listen(host: str, port: int) -> socket.socket:
    """Listens like gRPC's server, which takes either wildcard for both families."""
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)
