"""What strangers at its coordinator's and a node's port cost a run: ``python -m tests.bench.strangers [--json] [--seconds
15]``.

Two nodes train a small model in processes of their own. Strangers are one more process. It holds 2,000 silent connections and
reopens the ones that are cut off; or it makes 1,000 connections a second and sends 4 MiB on each that gets through TLS.

Strangers have machines of their own: so that process has the first core to itself, and the run has the others. They still share
memory and a kernel. So for comparison the process does the same to a decoy: a port of nobody's that accepts, reads and closes.
Phases alternate: quiet, at the decoy, at the coordinator, at a node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from dtfm.protos.connection import read_address
from dtfm.protos.open_files import raise_limit
from tests.bench.rows import Row, show
from tests.cluster.launch import ROOT, Cluster
from tests.cluster.runs import run_file

SILENT = 2000
GREETINGS_PER_SECOND = 1000
LARGE = 4 << 20
PHASES = ("quiet", "decoy", "coordinator", "node")
ROUNDS = 3


async def silent(host: str, port: int) -> None:
    """Holds SILENT connections. Opens each that ends again, after a second."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                await reader.read(1)
                writer.close()
            await asyncio.sleep(1)

    await asyncio.gather(*(one() for _ in range(SILENT)))


async def large(host: str, port: int) -> None:
    """Begins GREETINGS_PER_SECOND connections a second, and sends LARGE bytes on each, in TLS if it is answered."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(LARGE)
    busy: set[asyncio.Task[None]] = set()

    async def one() -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            async with asyncio.timeout(5):
                _, writer = await asyncio.open_connection(host, port, ssl=context)
                writer.write(greeting)
                await writer.drain()
                writer.transport.abort()

    began, count = time.monotonic(), 0
    while True:
        for _ in range(count, int((time.monotonic() - began) * GREETINGS_PER_SECOND)):
            if len(busy) < 500:
                task = asyncio.create_task(one())
                busy.add(task)
                task.add_done_callback(busy.discard)
            count += 1
        await asyncio.sleep(0.002)


async def decoy() -> None:
    """Accepts, and closes at the first byte, or after 5 s."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1), 5)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.strangers", *arguments], cwd=ROOT, stdout=subprocess.PIPE
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def steps_in(cluster: Cluster, seconds: float) -> list[float]:
    """Seconds of each step committed from now on."""
    begin = len(cluster.events)
    time.sleep(seconds)
    return [e["seconds"] for e in cluster.events[begin:] if e["event"] == "step_committed"]


def keep_to(cores: Collection[int]) -> None:
    """Keeps this process, and all that it starts from now on, to these cores."""
    os.sched_setaffinity(0, cores)


def rows(seconds: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name, process("--as", "decoy") as other:
        assert other.stdout is not None
        decoy_port = other.stdout.readline().decode().strip()
        with Cluster(Path(name), run_file(stages=[1, 1], steps=1_000_000), nodes=["a", "b"]) as cluster:
            nobody = f"127.0.0.1:{decoy_port}"
            node = cluster.wait_for("node_joined")["address"]
            cluster.wait_for("step_committed", where=lambda event: event["step"] == 20)
            for what in ("silent", "large"):
                taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
                for _ in range(ROUNDS):
                    for phase in PHASES:
                        with contextlib.ExitStack() as stack:
                            if phase != "quiet":
                                where = {"decoy": nobody, "coordinator": cluster.address, "node": node}[phase]
                                stack.enter_context(process("--as", what, "--at", where))
                                time.sleep(2)
                            taken[phase] += steps_in(cluster, seconds)
                middle = {phase: statistics.median(steps) for phase, steps in taken.items()}
                label = (
                    f"{SILENT} silent connections" if what == "silent" else f"{GREETINGS_PER_SECOND} greetings a second"
                )
                yield Row(f"step, nobody else (before: {label})", middle["quiet"], "s")
                yield Row(f"step, {label} at a decoy", middle["decoy"], "s", "quiet", middle["decoy"] / middle["quiet"])
                for phase in ("coordinator", "node"):
                    ratio = middle[phase] / middle["decoy"]
                    yield Row(f"step, {label} at the {phase}", middle[phase], "s", "decoy", ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--as", dest="role", choices=("silent", "large", "decoy"), help=argparse.SUPPRESS)
    parser.add_argument("--at", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    raise_limit()
    first, *others = range(os.cpu_count() or 1)
    if arguments.role == "decoy":
        keep_to([first])
        asyncio.run(decoy())
    elif arguments.role is not None:
        keep_to([first])
        asyncio.run({"silent": silent, "large": large}[arguments.role](*read_address(arguments.at)))
    else:
        if not others:
            parser.error("one core: strangers need another than the run's")
        keep_to(others)
        show("Strangers at the ports", list(rows(arguments.seconds)), arguments.json)


if __name__ == "__main__":
    main()
