"""A wide-area network on this machine: ``with Wan(network) as wan: wan.run("n0", [...])``.

Each node and the coordinator have a network namespace. The emulator (emulator.py) joins them, with the latency, rate, queue and
loss of each direction of each pair. Nothing leaves the machine, as the namespaces have no other way out.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dtfm.scheduler.model.cluster import Cluster
from tests.wan.shape import Link, Traffic, usual_queue_bytes

COORDINATOR = "coordinator"
CONTROL_LINK = Link(0.005, 12.5e6, usual_queue_bytes(0.005, 12.5e6))
"""The default of the links between the coordinator and each node: 5 ms, 100 Mbit/s."""
_ROOT = Path(__file__).parents[2]
_MOST_NODES = 253


class WanUnavailable(Exception):
    """This machine allows no emulated network, for the reason in the text."""


class Wan:
    """A context in which the nodes of ``network`` and a coordinator each have a namespace.

    A pair's bandwidth is the rate of its IP packets, so a TCP connection gets 96% of it. A node's ``up`` and ``down`` limit
    what it exchanges with all its peers together. Raises ValueError for a network that cannot be emulated, and on entry
    WanUnavailable.
    """

    def __init__(self, network: Cluster, *, control: Link = CONTROL_LINK, loss: float = 0.0, seed: int = 1) -> None:
        """``control``: the links to and from the coordinator. ``loss``: the share of packets that all other links lose."""
        if COORDINATOR in network.ids:
            raise ValueError(f"nodes: the id {COORDINATOR!r} is taken by the coordinator; name the node otherwise")
        if len(network.ids) > _MOST_NODES:
            raise ValueError(f"nodes: {len(network.ids)} are more than the {_MOST_NODES} that can be emulated")
        self.network = network
        self.names = (*network.ids, COORDINATOR)
        self._number = {name: number for number, name in enumerate(self.names)}
        self._links: dict[tuple[str, str], Link] = {}
        for i, source in enumerate(network.ids):
            self._links[source, COORDINATOR] = self._links[COORDINATOR, source] = control
            for j, destination in enumerate(network.ids):
                if i != j:
                    latency, rate = float(network.latency[i, j]), float(network.bandwidth[i, j])
                    queue = usual_queue_bytes(latency, rate)
                    self._links[source, destination] = Link(latency, rate, queue, loss)
        self._seed = seed
        self._emulator: subprocess.Popen[bytes] | None = None
        self._namespaces: list[int] = []
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Wan:
        if not sys.platform.startswith("linux"):
            raise WanUnavailable(f"network namespaces are Linux's, and this is {sys.platform}")
        for tool, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
            if shutil.which(tool) is None:
                raise WanUnavailable(f"there is no command {tool!r} here; on Debian: apt-get install {package}")
        self._emulator = subprocess.Popen(
            [sys.executable, "-m", "tests.wan.emulator"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us alone; the emulator ends when we close its input
        )
        try:
            links = [[*self._pair(*pair), asdict(link)] for pair, link in self._links.items()]
            limits = {name: [*(getattr(n, name) for n in self.network.nodes), None] for name in ("up", "down")}
            addresses = [self.address(name) for name in self.names]
            answer = self._ask({"addresses": addresses, "links": links, "seed": self._seed, **limits})
            if "unavailable" in answer:
                raise WanUnavailable(answer["unavailable"])
            self._namespaces = answer["namespaces"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills the processes of ``run`` that still run, and takes the network down."""
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._started:
            process.wait(10)
        self._started.clear()
        if self._emulator is not None:
            assert self._emulator.stdin is not None
            assert self._emulator.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._emulator.stdin.close()
            try:
                self._emulator.wait(5)
            except subprocess.TimeoutExpired:
                self._emulator.kill()
                self._emulator.wait(10)
            self._emulator.stdout.close()
            self._emulator = None

    def address(self, name: str) -> str:
        """The IPv4 address of a node, or of the coordinator."""
        return f"10.77.0.{self._number[name] + 1}"

    def inside(self, name: str, command: list[str]) -> list[str]:
        """The command that runs ``command`` in the node's namespace, as the same process."""
        assert self._emulator is not None, "the network is not up"
        namespace = f"/proc/{self._emulator.pid}/fd/{self._namespaces[self._number[name]]}"
        return ["nsenter", f"--net={namespace}", "--", *command]

    def run(self, name: str, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts ``command`` in the node's namespace; ``options`` are Popen's. If it still runs at the end, it is killed."""
        process = subprocess.Popen(self.inside(name, command), start_new_session=True, **options)
        self._started.append(process)
        return process

    def link(self, source: str, destination: str) -> Link:
        """The link as it is now."""
        return self._links[source, destination]

    def set_link(
        self,
        source: str,
        destination: str,
        *,
        latency_ms: float | None = None,
        gbps: float | None = None,
        queue_bytes: int | None = None,
        loss: float | None = None,
        swallows_from: int | None = None,
    ) -> None:
        """Changes the named properties of one direction of a pair from now on. 0 ``gbps`` cuts it."""
        changes: dict[str, Any] = {"queue_bytes": queue_bytes, "loss": loss, "swallows_from": swallows_from}
        changes["latency"] = None if latency_ms is None else latency_ms / 1e3
        changes["rate"] = None if gbps is None else gbps * 1e9 / 8
        link = replace(
            self._links[source, destination], **{key: value for key, value in changes.items() if value is not None}
        )
        if queue_bytes is None and (latency_ms is not None or gbps is not None):
            link = replace(link, queue_bytes=usual_queue_bytes(link.latency, link.rate))
        self._links[source, destination] = link
        self._ask({"link": [*self._pair(source, destination), asdict(link)]})

    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """What each link has carried since the start, including headers."""
        answer = self._ask({"traffic": True})
        return {(self.names[i], self.names[j]): Traffic(**seen) for i, j, seen in answer["traffic"]}

    def _pair(self, source: str, destination: str) -> tuple[int, int]:
        return self._number[source], self._number[destination]

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._emulator is not None, "the network is not up"
        assert self._emulator.stdin is not None
        assert self._emulator.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._emulator.stdin.write(json.dumps(order).encode() + b"\n")
            self._emulator.stdin.flush()
        line = self._emulator.stdout.readline()
        if not line:
            raise RuntimeError(f"the emulator ended with exit code {self._emulator.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer
