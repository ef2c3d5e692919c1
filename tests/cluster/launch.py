"""A coordinator and nodes as real processes on this machine's loopback, and their events as they happen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from dtfm.coordinator.log.audit import Audit, audit
from dtfm.coordinator.log.store import Store
from tests.cluster.faults import COORDINATOR, HOLD, Fault, announcement, gate, to_text
from tests.cluster.nursery import MODULES, Command, nursery
from tests.cluster.runs import write_corpus

Event = dict[str, Any]
ROOT = Path(__file__).parents[2]


class Running(Protocol):
    """What subprocess.Popen and nursery.Child have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def send_signal(self, number: signal.Signals, /) -> None: ...
    def kill(self) -> None: ...


class Process:
    """One child process; its standard error is read as it comes, its standard output line by line by ``on_line``.

    A node or a coordinator comes from the nursery, in no time, unless it is to be ``fresh``: an interpreter of its own.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        *,
        environment: dict[str, str] | None = None,
        on_line: Callable[[bytes], None] = lambda line: None,
        faults: Sequence[Fault] = (),
        fresh: bool = False,
    ) -> None:
        self._changed = threading.Condition()
        self._errors = bytearray()
        network, inner = _namespace(command)
        forked = not fresh and inner[0] == sys.executable and inner[1] == "-m" and inner[2] in MODULES
        assert forked or not faults, "faults are carried out by the nursery's children"
        settings = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(folder / "cache"),
            **(environment or {}),
        }
        output, writing_output = os.pipe()
        errors, writing_errors = os.pipe()
        self.running: Running
        try:
            if forked:
                text = to_text(faults) if faults else ""
                order = Command(inner[2], tuple(inner[3:]), str(folder), {**os.environ, **settings}, text, network)
                self.running = nursery().fork(order, writing_output, writing_errors)
            else:
                self.running = subprocess.Popen(
                    command,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=writing_output,
                    stderr=writing_errors,
                    env={**os.environ, **settings},
                    start_new_session=True,
                )
        finally:
            os.close(writing_output)
            os.close(writing_errors)
        self._readers = [
            threading.Thread(target=self._read, args=(output, on_line), daemon=True),
            threading.Thread(target=self._read, args=(errors, self._keep), daemon=True),
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
        code = self.running.wait(timeout)
        for reader in self._readers:
            reader.join(10)
        return code

    def wait_for_error(self, part: str, timeout: float = 60) -> None:
        """Until standard error contains ``part``."""
        with self._changed:
            found = self._changed.wait_for(lambda: part.encode() in self._errors, timeout)
        assert found, f"{part!r} did not come in {timeout:.0f} s:\n{self.errors}"

    def send(self, number: signal.Signals) -> None:
        self.running.send_signal(number)

    def close(self) -> None:
        if self.running.poll() is None:
            self.running.kill()
        self.wait(10)

    def _keep(self, line: bytes) -> None:
        with self._changed:
            self._errors += line
            self._changed.notify_all()

    @staticmethod
    def _read(descriptor: int, on_line: Callable[[bytes], None]) -> None:
        with open(descriptor, "rb") as stream:
            for line in stream:
                on_line(line)


def _namespace(command: list[str]) -> tuple[str, list[str]]:
    """The file of the network namespace that nsenter shall run the rest in (empty: none), and that rest."""
    if command[0] == "nsenter" and command[1].startswith("--net=") and command[2] == "--":
        return command[1].removeprefix("--net="), command[3:]
    return "", command


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
        faults: Sequence[Fault] = (),
        fresh: bool = False,
        nodes: Sequence[str] = (),
        alike: bool = True,
    ) -> None:
        """``place`` makes the command of "coordinator" or a node run elsewhere, as the same process. Each of ``faults``
        happens once, in whichever process of that name comes to its moment first. ``fresh`` as for Process. ``nodes`` are
        added at once. ``alike``: plans are not to follow what nodes measure beside each other (alike.py)."""
        self.folder = folder
        self.run_file = folder / "run.toml"
        self.run_file.write_text(run)
        write_corpus(folder)
        self.store = f"sqlite:///{folder}/store.db"
        self.address = address
        self._start = start
        self._place = place
        self._faults = faults
        self._started: list[tuple[str, Process]] = []
        for fault in faults:
            if fault.means is HOLD:
                os.mkfifo(folder / gate(fault))
        self._gates: list[int] = []
        self._fresh = fresh
        self._first = nodes
        self._coordinator = "tests.cluster.alike" if alike else "dtfm.coordinator.cli"
        self.events: list[Event] = []
        self.nodes: dict[str, Process] = {}
        self.coordinator: Process | None = None
        self._changed = threading.Condition()

    def __enter__(self) -> Cluster:
        if self._start:
            self.start_coordinator()
        for name in self._first:
            self.add(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, process in self._started:
            process.close()
        for opened in self._gates:
            os.close(opened)
        if error is not None:  # what a person would look at first
            for name, process in self._started:
                print(f"--- {name}\n{process.errors[-3000:]}", file=sys.stderr)

    def start_coordinator(self, *options: str) -> None:
        """Serves the run; a second call, after the first one ended, with the same store and address."""
        command = [sys.executable, "-m", self._coordinator, "serve", str(self.run_file), "--listen", self.address]
        command += ["--store", self.store, "--json", "--verbose", *options]
        begun = len(self.events)
        self.coordinator = self._process(COORDINATOR, command, on_line=self._heard)
        self.address = self.wait_for("listening", after=begun)["address"]

    def add(self, name: str, *options: str, environment: dict[str, str] | None = None) -> Process:
        command = [*join_command(self.address, name), "--give-up-after", "20", *options]
        process = self._process(name, command, environment=environment)
        self.nodes[name] = process
        return process

    def let_go(self, hold: Fault) -> None:
        """Whoever is held there goes on; whoever comes there passes."""
        self._gates.append(os.open(self.folder / gate(hold), os.O_RDWR))  # to write alone would wait for a reader

    def wait_for(
        self, event: str, *, where: Callable[[Event], bool] = lambda _: True, after: int = 0, timeout: float = 60
    ) -> Event:
        """The first event of that name, from number ``after`` on, for which ``where`` holds; waits for it. Fails when the
        coordinator ends without it."""
        deadline = time.monotonic() + timeout
        assert self.coordinator is not None
        while True:
            ended = self.coordinator.running.poll() is not None
            if ended:
                self.coordinator.wait(10)
            with self._changed:
                while after < len(self.events):
                    found = self.events[after]
                    after += 1
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
        with Store(self.store, write=False) as store:
            return [record.to_json() for record in store.read()]

    def audit(self) -> Audit:
        """What `dtfm-coordinator audit` finds in the store."""
        with Store(self.store, write=False) as store:
            return audit(store.read())

    @property
    def losses(self) -> list[float]:
        return [e["loss"] for e in self.of("step_committed")]

    def _process(self, name: str, command: list[str], **options: Any) -> Process:
        happened = "".join(process.errors for started, process in self._started if started == name)
        faults = [f for f in self._faults if f.process == name and announcement(f) not in happened]
        process = Process(self._place(name, command), self.folder, faults=faults, fresh=self._fresh, **options)
        self._started.append((name, process))
        return process

    def _heard(self, line: bytes) -> None:
        with self._changed:
            self.events.append(json.loads(line))
            self._changed.notify_all()
