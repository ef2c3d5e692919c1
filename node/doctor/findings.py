"""What a machine's facts mean for a node on it: each function turns some facts into a finding with its fix. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from dtfm.installed import install_line
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


def on_packages(missing: Sequence[str], versions: Mapping[str, str]) -> Finding:
    if missing:
        return Finding("packages", False, f"{', '.join(missing)} not installed", install_line("node"))
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
    """``most``: what a node's process may have open, once it has raised its limit as far as it is let."""
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
    """``control``: the one in use; empty: not known."""
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
    """Whether TCP starts slowly again after a pause longer than its retransmission timeout (0.2 s or more), as links pause in
    every step. Linux does so by default, except with BBR."""
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """``source``: where it is from: "--advertise", "Vast or RunPod", "router", "interface", "coordinator" (where that sees this
    machine). ``problem``: why this machine cannot reach itself there; empty if it can. ``outside``: why the coordinator cannot;
    None: it was not asked, or sees this machine elsewhere."""

    address: str
    source: str
    problem: str = ""
    outside: str | None = None

    @property
    def is_reached(self) -> bool:
        return not (self.problem if self.outside is None else self.outside)


def on_candidate(candidate: Candidate, port: int) -> Finding:
    """``port``: on which a node would listen. What the coordinator sees counts more than what this machine does: many routers
    lead nobody home from inside."""
    check = f"candidate {candidate.address}"
    known = f"{way_to(ip_address(read_address(candidate.address)[0]))}, from {candidate.source}"
    who = "from here" if candidate.outside is None else "by the coordinator"
    if candidate.is_reached:
        return Finding(check, True, f"{known}: reached {who}")
    fix = {
        "--advertise": f"is it this machine's, and does its router or firewall lead {candidate.address} to port {port} here?",
        "Vast or RunPod": f"is port {port} mapped in the template, and free of other programs?",
        "router": f"if peers do not reach it either, forward TCP {candidate.address} to port {port} by hand",
        "coordinator": f"if peers are to dial this machine, let its router lead a port to {port} here, and --advertise it",
        "interface": f"let TCP port {port} in: ufw allow {port}/tcp, or iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
    }[candidate.source]
    must = candidate.source == "interface" or (candidate.outside is not None and candidate.source != "coordinator")
    why = candidate.problem if candidate.outside is None else candidate.outside
    return Finding(check, False if must else None, f"{known}: not reached {who} ({why})", fix)


def on_being_behind_nat(facing: str, candidates: Sequence[Candidate], behind_nat: bool) -> Finding:
    """Whether others can dial this machine: if not, connections are lent."""
    if any(candidate.outside == "" for candidate in candidates):
        return Finding("reach", True, "the coordinator reaches this machine")
    if not behind_nat:
        return Finding("reach", True, f"this machine faces the coordinator as {facing}, without NAT between them")
    if any(c.outside is None and way_to(ip_address(read_address(c.address)[0])) == "public" for c in candidates):
        return Finding("reach", True, f"this machine is behind NAT ({facing}), and has a public candidate")
    return Finding(
        "reach",
        None,
        f"this machine is behind NAT ({facing}), and nobody outside reaches it: it dials others, or a relay where that fails",
        "turn UPnP on at the router; or forward a port to this machine, and: --listen 0.0.0.0:PORT --advertise PUBLIC_IP:PORT",
    )


def on_no_view_from_outside(why: str) -> Finding:
    fix = "run the doctor again: until then nobody knows whether others reach this machine"
    return Finding("outside", None, f"the coordinator did not dial this machine: {why}", fix)
