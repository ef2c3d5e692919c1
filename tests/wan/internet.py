"""A small internet on this machine, with homes behind routers that do network address translation (NAT), done by the kernel.

    with Internet() as net:
        net.host("coordinator")                     # a public machine
        net.router("home")                          # a router with a network of its own behind it
        net.host("a", behind="home")
        net.forward("home", 7401, "a")              # its port 7401 leads to the one of a
        net.run("a", [...])

Each host and router has a network namespace; a bridge joins what is public. Namespaces have no names and no way out: they end
with the processes in them, at the latest when the block is left. wan.py emulates slow and lossy links; nothing is slow here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from types import TracebackType
from typing import Any

PUBLIC = "203.0.113"
"""The first bytes of public IPv4 addresses (RFC 5737), a /24."""
PUBLIC_V6 = "2001:db8::"
"""The prefix of public IPv6 addresses (RFC 3849), a /64."""
LAN = "192.168.1"
"""The first bytes of the addresses behind every router. They are the same in all homes, as in life."""

NEEDED = (("ip", "iproute2"), ("nft", "nftables"), ("nsenter", "util-linux"), ("unshare", "util-linux"))

_FIREWALL = """
table inet filter {
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    ct status dnat accept
    iifname "br0" accept
  }
}
table ip nat {
  chain postrouting {
    type nat hook postrouting priority 100;
    oifname "eth0" masquerade
  }
  chain prerouting { type nat hook prerouting priority -100; }
}
"""
"""Of a router: eth0 faces the internet, br0 the home. What comes from outside passes only as an answer, or through a forward."""


class InternetUnavailable(Exception):
    """This machine allows no such network, for the reason in the text."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A namespace, held by a process that ends with its standard input. ``address`` is IPv4, or IPv6 where there is no other;
    ``home``: the router that it is behind."""

    holder: subprocess.Popen[bytes]
    address: str
    home: str = ""

    @property
    def namespace(self) -> str:
        return f"/proc/{self.holder.pid}/ns/net"


class Internet:
    """A context. Raises InternetUnavailable on entry."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._behind: dict[str, int] = {}
        self._public = 0
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Internet:
        if not sys.platform.startswith("linux"):
            raise InternetUnavailable(f"network namespaces are Linux's, and this is {sys.platform}")
        for tool, package in NEEDED:
            if shutil.which(tool) is None:
                raise InternetUnavailable(f"there is no command {tool!r} here; on Debian: apt-get install {package}")
        try:
            self._places["internet"] = _Place(_hold(), "")
            self._ip("internet", "link add name br0 type bridge")
            self._ip("internet", "link set br0 up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills the processes of ``run`` that still run, and takes everything down."""
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        self._started.clear()
        for place in self._places.values():
            assert place.holder.stdin is not None
            place.holder.stdin.close()
        for place in self._places.values():
            place.holder.wait(10)
            assert place.holder.stdout is not None
            place.holder.stdout.close()
        self._places.clear()

    def host(self, name: str, *, behind: str = "", ipv6_only: bool = False) -> str:
        """Adds a machine, public or behind a router; returns its address. With ``ipv6_only`` it is public and has no IPv4."""
        if behind:
            self._behind[behind] += 1
            address = f"{LAN}.{self._behind[behind] + 1}"
            self._add(name, address, home=behind)
            self._plug(name, behind, f"{address}/24")
            self._ip(name, f"route add default via {LAN}.1")
        else:
            self._public += 1
            number = self._public
            address = f"{PUBLIC_V6}{number}" if ipv6_only else f"{PUBLIC}.{number}"
            self._add(name, address)
            self._plug(name, "internet", f"{address}/{64 if ipv6_only else 24}")
        return address

    def router(self, name: str) -> str:
        """Adds a router with a network behind it; returns its public address."""
        address = self.host(name)
        self._behind[name] = 0
        self._ip(name, "link add name br0 type bridge")
        self._ip(name, f"address add {LAN}.1/24 dev br0")
        self._ip(name, "link set br0 up")
        self._inside(name, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._inside(name, "nft", "-f", "-", text=_FIREWALL)
        return address

    def forward(self, router: str, port: int, host: str, *, hairpin: bool = False) -> None:
        """From now on TCP ``port`` of the router's public address leads to the same port of ``host``, behind it. ``hairpin``:
        also from behind the router, over the router."""
        rule = f'add rule ip nat prerouting iifname "eth0" tcp dport {port} dnat to {self.address(host)}:{port}'
        self._inside(router, "nft", *rule.split())
        if hairpin:
            public, home = self.address(router), f"{LAN}.0/24"
            inside = f"ip daddr {public} tcp dport {port} dnat to {self.address(host)}:{port}"
            back = f'oifname "br0" ip saddr {home} ip daddr {home} masquerade'
            self._inside(router, "nft", *f'add rule ip nat prerouting iifname "br0" {inside}'.split())
            self._inside(router, "nft", *f"add rule ip nat postrouting {back}".split())

    def limit(self, host: str, megabits: float) -> None:
        """From now on the host sends at most so many Mbit/s."""
        self._inside(host, *f"tc qdisc replace dev eth0 root tbf rate {megabits}mbit burst 64kb latency 200ms".split())

    def address(self, name: str) -> str:
        """The host's own address; behind a router a private one."""
        return self._places[name].address

    def inside(self, name: str, command: list[str]) -> list[str]:
        """The command that runs ``command`` on the host, as the same process."""
        return ["nsenter", f"--net={self._places[name].namespace}", "--", *command]

    def run(self, name: str, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts ``command`` on the host; ``options`` are Popen's. If it still runs at the end, it is killed."""
        process = subprocess.Popen(self.inside(name, command), start_new_session=True, **options)
        self._started.append(process)
        return process

    def connected_to(self, name: str) -> set[str]:
        """The other ends of the host's established TCP connections over IPv4."""
        tables = self.inside(name, ["cat", "/proc/self/net/tcp", "/proc/self/net/tcp6"])
        text = subprocess.run(tables, capture_output=True, text=True, timeout=20, check=True).stdout
        lines = [line.split() for line in text.splitlines()]
        # A socket of IPv6 that speaks IPv4 has an address that ends with it.
        ends = (line[2].partition(":")[0][-8:] for line in lines if line[3] == "01")
        return {str(IPv4Address(int.from_bytes(bytes.fromhex(end), sys.byteorder))) for end in ends}

    def move(self, name: str, address: str) -> None:
        """Gives a host behind a router another address in its home, as DHCP does. Its connections break."""
        place = self._places[name]
        assert place.home
        self._ip(name, "address flush dev eth0 scope global")
        self._ip(name, f"address add {address}/24 dev eth0")
        self._ip(name, f"route add default via {LAN}.1")
        self._places[name] = replace(place, address=address)
        for other in [each for each, its in self._places.items() if its.home == place.home]:
            self._ip(other, "neigh flush dev eth0")  # as a machine that gets an address makes itself known

    def unplug(self, name: str) -> None:
        """Cuts the host off: from now on nothing reaches it, and it hears nothing of that."""
        self._ip(name, "link set eth0 down")

    def _add(self, name: str, address: str, home: str = "") -> None:
        assert name not in self._places, f"{name} is there already"
        self._places[name] = _Place(_hold(), address, home)
        self._ip(name, "link set lo up")

    def _plug(self, name: str, switch: str, address: str) -> None:
        """A cable from a host to the bridge of ``switch``."""
        pid = self._places[name].holder.pid
        # With a name that cannot collide while both ends are in one namespace.
        self._ip(switch, f"link add name to-{name} type veth peer name cable")
        self._ip(switch, f"link set dev cable netns {pid} name eth0")
        self._ip(switch, f"link set dev to-{name} master br0 up")
        self._ip(name, f"address add {address} dev eth0 {'nodad' if ':' in address else ''}")
        self._ip(name, "link set dev eth0 up")

    def _ip(self, name: str, arguments: str) -> None:
        self._inside(name, "ip", *arguments.split())

    def _inside(self, name: str, *command: str, text: str = "") -> None:
        done = subprocess.run(self.inside(name, list(command)), input=text, capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise InternetUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")


def _hold() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own, which does nothing until its input ends."""
    holder = subprocess.Popen(
        ["unshare", "--net", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        holder.stdin.write(b"\n")
        holder.stdin.flush()
    # cat answers once the namespace is there.
    if (answer := holder.stdout.readline()) != b"\n":
        raise InternetUnavailable(answer.decode(errors="replace").strip())
    return holder
