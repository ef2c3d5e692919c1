"""Turns a machine's facts into findings with their fixes, a function for each kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from dtfm.installed import torch_line
from dtfm.node.host.packages import EXTRA
from dtfm.protos.candidates import way_to
from dtfm.protos.connection import read_address

LEAST_DISK_BYTES = 1 << 30
LEAST_DISK_SPEED = 50e6
"""Bytes per second below which snapshots hold up a node of usual size for minutes."""
LEAST_TCP_BUFFER_BYTES = 16 << 20
"""A stream fills 1 Gbit/s over 100 ms only with about this many bytes in flight."""
LEAST_OPEN_FILES, ENOUGH_OPEN_FILES = 256, 4096
"""A node has some connections to each peer, and some libraries' files; hundreds of peers need thousands."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``good`` is False if a node will not work, None if it works less well than it could. ``fix`` may be empty."""

    check: str
    good: bool | None
    finding: str
    fix: str = ""


def on_packages(missing: Sequence[str], versions: Mapping[str, str], extra: str = "node") -> Finding:
    """``extra``: dtfm's extra for this machine, with or without a GPU."""
    if missing:
        return Finding("packages", False, f"{', '.join(missing)} not installed", torch_line(extra))
    return Finding("packages", True, ", ".join(f"{name} {versions[name]}" for name in EXTRA if name in versions))


def on_device(kind: str, sentence: str) -> Finding:
    if kind == "cpu":
        return Finding("device", None, sentence, "a GPU computes far faster: nvidia-smi shows whether there is one")
    return Finding("device", True, sentence)


def on_disk(folder: str, free: int, written: float | None, problem: str = "") -> Finding:
    """``free``: bytes. ``written``: bytes per second, with fsync; None if it could not be tried, because of ``problem``."""
    if problem:
        fix = "make the folder writable, or give another with --snapshots DIR"
        return Finding("disk", False, f"{folder} cannot be written: {problem}", fix)
    state = f"{free / 2**30:.1f} GiB free in {folder}"
    if written is not None:
        state += f", written at {written / 1e6:.0f} MB/s"
    if free < LEAST_DISK_BYTES:
        fix = f"tokenized data and snapshots need space: free {LEAST_DISK_BYTES >> 30} GiB, or give --snapshots DIR"
        return Finding("disk", False, state, fix)
    if written is not None and written < LEAST_DISK_SPEED:
        return Finding("disk", None, f"{state}: snapshots take long", "give a folder on a faster disk: --snapshots DIR")
    return Finding("disk", True, state)


def on_open_files(most: int) -> Finding:
    """``most``: the number of files that a node's process may have open, with its limit raised as far as possible."""
    if most >= ENOUGH_OPEN_FILES:
        return Finding("open files", True, f"at most {most}")
    fix = (
        f"raise the hard limit: nofile in /etc/security/limits.conf, LimitNOFILE={ENOUGH_OPEN_FILES} in a systemd unit, "
        f"--ulimit nofile={ENOUGH_OPEN_FILES} with Docker"
    )
    good = None if most >= LEAST_OPEN_FILES else False
    return Finding("open files", good, f"at most {most}: too few beside hundreds of peers", fix)


def on_tcp_buffers(most: Mapping[str, int] | None) -> Finding:
    """``most``: how many bytes Linux lets a connection have in flight, by direction; None: not known."""
    if most is None:
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


def on_congestion_control(control: str, available: Sequence[str]) -> Finding:
    """``control``: the congestion control in use; empty: not known."""
    if not control:
        return Finding("congestion control", None, "unknown on this system", "nothing to do on a fast local network")
    if control.startswith("bbr"):
        return Finding("congestion control", True, control)
    load = "" if "bbr" in available else "modprobe tcp_bbr; "
    return Finding(
        "congestion control",
        None,
        f"{control}, which takes every lost packet for a full line",
        f"{load}sysctl -w net.core.default_qdisc=fq net.ipv4.tcp_congestion_control=bbr",
    )


def on_pauses(control: str, slow_start_after_idle: bool) -> Finding:
    """Whether TCP starts slowly again after a pause longer than its retransmission timeout (0.2 s or more). Links pause in
    every step. Linux starts slowly by default, except with BBR."""
    if not control:
        return Finding("tcp pauses", None, "unknown on this system", "nothing to do on a fast local network")
    if control.startswith("bbr") or not slow_start_after_idle:
        return Finding("tcp pauses", True, f"a connection keeps its speed after a pause ({control})")
    return Finding(
        "tcp pauses",
        None,
        f"under {control} a connection starts slowly again after a pause: over far links each step takes longer",
        "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 (with Docker, run the container with --sysctl and that)",
    )


def on_being_behind_nat(facing: str, candidates: Sequence[str], behind_nat: bool) -> Finding:
    """Whether others can dial this machine at one of its ``candidates``: if not, connections are lent."""
    if not behind_nat:
        return Finding("reach", True, f"this machine faces the coordinator as {facing}, without NAT between them")
    for candidate in candidates:
        if way_to(ip_address(read_address(candidate)[0])) == "public":
            return Finding(
                "reach", True, f"this machine is behind NAT ({facing}), and others may reach it at {candidate}"
            )
    return Finding(
        "reach",
        None,
        f"this machine is behind NAT ({facing}), and has no address outside: it dials others, or a relay where that fails",
        "turn UPnP on at the router; or forward a port to this machine, and: --listen 0.0.0.0:PORT --advertise PUBLIC_IP:PORT",
    )
