"""How much tensors that come and go slow a thread that launches kernels: ``python -m tests.bench.launches [--device cuda]
[--switch SECONDS] [--json]``.

A node launches its stage's kernels in one thread, and its event loop takes in and sends frames in another. Both need Python's
lock. Here one thread launches small operations on the device, 2,000 at a time. Another process sends tensors to this one and
takes tensors from it, over streams with certificates on both sides. It sends nothing, 1 Gbit/s in each direction, and as much
as possible. The three alternate; values are medians over turns, a ratio is the median of the ratios within each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dtfm.node.host.device import keep_freed_memory
from tests.bench.rows import Row, show
from tests.bench.stream import End
from tests.bench.stream_end import RECEIVER, TENSOR_BYTES, Receiver, Sender
from tests.cluster.launch import ROOT
from tests.protos.members import member

WAY = "ours, mTLS"
LAUNCHES = 2_000
TURNS, TURN_SECONDS = 5, 2.0
GIGABIT = 1e9 / 8
LOADS = {"nothing comes or goes": 0.0, "1 Gbit/s each way": GIGABIT, "as much as goes": float("inf")}
"""Bytes per second in each direction."""


class Traffic:
    """Tensors from and to another process, by an event loop in a thread of this one."""

    def __init__(self, other: End) -> None:
        self._other, self._sender = other, Sender(member("sender"))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        # The other end has the certificate of the name that senders expect, so this one has it, too.
        receiver = asyncio.run_coroutine_threadsafe(self._receiver(), self._loop).result()
        self._port = receiver[WAY]

    async def _receiver(self) -> dict[str, int]:
        self._kept = Receiver(member(RECEIVER))
        return await self._kept.start("127.0.0.1")

    @contextmanager
    def at(self, rate: float) -> Iterator[Callable[[], float]]:
        """A context with ``rate`` bytes per second each way. Yields a function that returns the bytes that have come and gone
        so far."""
        ended, moved = threading.Event(), [0, 0]

        def go(direction: int, send: Callable[[], None]) -> None:
            began = time.perf_counter()
            while not ended.is_set():
                send()
                moved[direction] += TENSOR_BYTES
                ended.wait(began + moved[direction] / rate - time.perf_counter())

        def come_in() -> None:
            self._other.send(WAY, f"127.0.0.1:{self._port}", 1)

        def go_out() -> None:
            sending = self._sender.send(WAY, self._other.address(WAY), 1)
            asyncio.run_coroutine_threadsafe(sending, self._loop).result()

        threads = [threading.Thread(target=go, args=pair) for pair in enumerate((come_in, go_out))] if rate else []
        for thread in threads:
            thread.start()
        try:
            yield lambda: float(sum(moved))
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def launches_per_second(device: torch.device, seconds: float) -> float:
    values, launched = torch.zeros(1_000, device=device), 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(LAUNCHES):
            values.add_(1.0)
        values[0].item()  # all have run
        launched += LAUNCHES
    return launched / (time.perf_counter() - began)


def measured(device: torch.device, traffic: Traffic) -> list[Row]:
    taken: dict[str, list[tuple[float, float]]] = {load: [] for load in LOADS}
    for turn in range(TURNS + 1):
        for load, rate in LOADS.items():
            with traffic.at(rate) as moved:
                began = time.perf_counter()
                launches = launches_per_second(device, TURN_SECONDS)
                speed = moved() / (time.perf_counter() - began)
            if turn:  # the first opens the streams
                taken[load].append((launches, speed))
    rows, (alone, *_) = [], LOADS
    for load, turns in taken.items():
        ratio = statistics.median(mine / first for (mine, _), (first, _) in zip(turns, taken[alone], strict=True))
        rows.append(Row(f"launches, {load}", statistics.median(each for each, _ in turns), "1/s", alone, ratio))
        rows.append(Row(f"both ways together, {load}", statistics.median(speed for _, speed in turns) / 1e6, "MB/s"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--switch", type=float, default=0.005, help="how long a thread keeps the lock if another waits")
    arguments = parser.parse_args()
    sys.setswitchinterval(arguments.switch)
    torch.set_num_threads(1)
    keep_freed_memory()
    command = (sys.executable, "-m", "tests.bench.stream_end", "127.0.0.1")
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        rows = measured(arguments.device, Traffic(End("127.0.0.1", process, member(RECEIVER))))
    finally:
        process.kill()
        process.communicate()
    show("Launches of small kernels, beside streams of tensors", rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
