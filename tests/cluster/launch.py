"""A coordinator and nodes as real processes on this machine's loopback, and their events as they happen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.cluster.runs import write_corpus

Event = dict[str, Any]
ROOT = Path(__file__).parents[2]


class Process:
    """One child process; its standard error is read as it comes, its standard output line by line by ``on_line``."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        *,
        environment: dict[str, str] | None = None,
        on_line: Callable[[bytes], None] = lambda line: None,
    ) -> None:
        self._changed = threading.Condition()
        self._errors = bytearray()
        self.popen = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(ROOT),
                **(environment or {}),
            },
            start_new_session=True,
        )
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self.popen.stdout, on_line), daemon=True),
            threading.Thread(target=self._read, args=(self.popen.stderr, self._keep), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def errors(self) -> str:
        """What it has printed to standard error."""
        with self._changed:
            return self._errors.decode(errors="replace")

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended and all that it printed is read."""
        code = self.popen.wait(timeout)
        for reader in self._readers:
            reader.join(10)
        return code

    def wait_for_error(self, part: str, timeout: float = 60) -> None:
        """Until standard error contains ``part``."""
        with self._changed:
            found = self._changed.wait_for(lambda: part.encode() in self._errors, timeout)
        assert found, f"{part!r} did not come in {timeout:.0f} s:\n{self.errors}"

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.wait(10)

    def _keep(self, line: bytes) -> None:
        with self._changed:
            self._errors += line
            self._changed.notify_all()

    @staticmethod
    def _read(stream: IO[bytes], on_line: Callable[[bytes], None]) -> None:
        with stream:
            for line in stream:
                on_line(line)


def join_command(coordinator: str, name: str) -> list[str]:
    """A node on the CPU with one thread."""
    command = [sys.executable, "-m", "dtfm.node.cli", "join", coordinator, "--id", name]
    return [*command, "--threads", "1", "--device", "cpu", "--verbose"]


def here(name: str, command: list[str]) -> list[str]:
    """Where a process runs unless told otherwise: beside the others."""
    return command


class Cluster:
    """``with Cluster(folder, run) as cluster``: a coordinator that serves ``run`` (TOML); nodes join with ``add``.

    Leaving the block ends every process.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        address: str = "127.0.0.1:0",
        start: bool = True,
        place: Callable[[str, list[str]], list[str]] = here,
    ) -> None:
        """``place`` makes the command of "coordinator" or a node run elsewhere, as the same process."""
        self.folder = folder
        self.run_file = folder / "run.toml"
        self.run_file.write_text(run)
        write_corpus(folder)
        self.store = f"sqlite:///{folder}/store.db"
        self.address = address
        self._start = start
        self._place = place
        self.events: list[Event] = []
        self.nodes: dict[str, Process] = {}
        self.coordinator: Process | None = None
        self._changed = threading.Condition()

    def __enter__(self) -> Cluster:
        if self._start:
            self.start_coordinator()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes = {**({"coordinator": self.coordinator} if self.coordinator else {}), **self.nodes}
        for process in processes.values():
            process.close()
        if error is not None:  # what a person would look at first
            for name, process in processes.items():
                print(f"--- {name}\n{process.errors[-3000:]}", file=sys.stderr)

    def start_coordinator(self, *options: str) -> None:
        """Serves the run; a second call, after the first one ended, with the same store and address."""
        command = [sys.executable, "-m", "dtfm.coordinator.cli", "serve", str(self.run_file), "--listen", self.address]
        command += ["--store", self.store, "--json", "--verbose", *options]
        begun = len(self.events)
        self.coordinator = Process(self._place("coordinator", command), self.folder, on_line=self._heard)
        self.address = self.wait_for("listening", after=begun)["address"]

    def add(self, name: str, *options: str, environment: dict[str, str] | None = None) -> Process:
        command = [*join_command(self.address, name), "--give-up-after", "20", *options]
        process = Process(self._place(name, command), self.folder, environment=environment)
        self.nodes[name] = process
        return process

    def wait_for(
        self, event: str, *, where: Callable[[Event], bool] = lambda _: True, after: int = 0, timeout: float = 60
    ) -> Event:
        """The first event of that name, from number ``after`` on, for which ``where`` holds; waits for it. Fails when the
        coordinator ends without it."""
        deadline = time.monotonic() + timeout
        assert self.coordinator is not None
        while True:
            ended = self.coordinator.popen.poll() is not None
            if ended:
                self.coordinator.wait(10)
            with self._changed:
                for found in self.events[after:]:
                    if found["event"] == event and where(found):
                        return found
                if ended or time.monotonic() > deadline:
                    break
                self._changed.wait(0.5)  # or sooner, when an event comes; the coordinator's death is no event
        why = "the coordinator ended" if ended else f"nothing for {timeout:.0f} s"
        last = [e["event"] for e in self.events[-5:]]
        raise AssertionError(f"waited for {event}: {why}; the last events were {last}\n{self.coordinator.errors}")

    def finish(self, timeout: float = 100) -> int:
        """Waits for coordinator and nodes to end by themselves; the coordinator's exit code."""
        assert self.coordinator is not None
        code = self.coordinator.wait(timeout)
        for process in self.nodes.values():
            process.wait(20)
        return code

    def of(self, event: str) -> list[Event]:
        return [e for e in self.events if e["event"] == event]

    def log(self) -> list[Event]:
        """All events, as the store has them."""
        command = [sys.executable, "-m", "dtfm.coordinator.cli", "events", "--store", self.store, "--json"]
        output = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
        return [json.loads(line) for line in output.splitlines()]

    @property
    def losses(self) -> list[float]:
        return [e["loss"] for e in self.of("step_committed")]

    def _heard(self, line: bytes) -> None:
        with self._changed:
            self.events.append(json.loads(line))
            self._changed.notify_all()
