"""A coordinator and nodes as real processes on this machine's loopback, and their events as they happen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from dtfm.coordinator.store.check import Checked
from dtfm.coordinator.store.store import Store
from tests.cluster.faults import COORDINATOR, HOLD, Fault, announcement, gate, to_text
from tests.cluster.nursery import MODULES, Command, nursery
from tests.cluster.ports import free_port
from tests.cluster.runs import write_corpus
from tests.coordinator.stores import checked

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
    """One child process. ``on_line`` gets each line of its standard output; its standard error is kept.

    The nursery forks a node or a coordinator in milliseconds. With ``fresh`` it gets an interpreter of its own.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        *,
        environment: dict[str, str] | None = None,
        on_line: Callable[[bytes], None] = lambda line: None,
        faults: tuple[str, str] | None = None,
        fresh: bool = False,
    ) -> None:
        """``faults`` as for nursery.Command."""
        self._changed = threading.Condition()
        self._errors = bytearray()
        network, inner = _namespace(command)
        forked = not fresh and inner[0] == sys.executable and inner[1] == "-m" and inner[2] in MODULES
        assert forked or faults is None, "only the nursery's children carry out faults"
        settings = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(folder / "cache"),
            # All processes of a test are one user's, so nodes need no invitation.
            "XDG_STATE_HOME": str(folder / "state"),
            **(environment or {}),
        }
        output, writing_output = os.pipe()
        errors, writing_errors = os.pipe()
        self.running: Running
        try:
            if forked:
                order = Command(inner[2], tuple(inner[3:]), str(folder), {**os.environ, **settings}, faults, network)
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
        """What the process has printed to standard error so far."""
        with self._changed:
            return self._errors.decode(errors="replace")

    def wait(self, timeout: float) -> int:
        """Waits until the process has ended and its output is read; returns the exit code."""
        code = self.running.wait(timeout)
        for reader in self._readers:
            reader.join(10)
        return code

    def wait_for_error(self, part: str, timeout: float = 60) -> None:
        """Waits until standard error contains ``part``."""
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
    """Splits a command that nsenter runs into the file of its network namespace and the command inside; else ("", command)."""
    if command[0] == "nsenter" and command[1].startswith("--net=") and command[2] == "--":
        return command[1].removeprefix("--net="), command[3:]
    return "", command


def join_command(coordinator: Sequence[str], name: str) -> list[str]:
    """The command of a node on the CPU with one thread. ``coordinator``: its address, or nothing."""
    command = [sys.executable, "-m", "dtfm.node.cli", "join", *coordinator, "--id", name]
    return [*command, "--threads", "1", "--device", "cpu", "--verbose"]


def _tells(event: Event) -> bool:
    """Whether the event may explain a failure: it reports more than a trained step."""
    return event["event"] not in ("step_committed", "evaluated")


def here(name: str, command: list[str]) -> list[str]:
    """The default of ``place``: every process runs in this machine's own network."""
    return command


class Cluster:
    """``with Cluster(folder, run) as cluster``: a coordinator that serves ``run`` (TOML). ``add`` starts a node. ``invitation``:
    the first invitation that it printed, for nodes of other users.

    Leaving the block ends every process.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        address: str = "",
        store: str = "",
        start: bool = True,
        place: Callable[[str, list[str]], list[str]] = here,
        faults: Sequence[Fault] | None = None,
        fresh: bool | Collection[str] = False,
        nodes: Sequence[str] = (),
        alike: bool = True,
        coordinator: str = "",
        invited: bool | Collection[str] = False,
        liars: bool = False,
    ) -> None:
        """``place`` turns the command of "coordinator" or of a node into one that runs the same process elsewhere. Each of
        ``faults`` happens once, in the process of its name that reaches its moment first; `inject` adds more, unless
        ``faults`` is None. ``fresh`` as for Process, for all nodes or the named ones. ``nodes`` are added at once. ``alike``:
        the scheduler sees all nodes and links as equal (alike.py), so that plans do not follow what the nodes measure while they
        share cores. ``coordinator``: the module of another command for it. ``invited``: each node, or each named one, belongs
        to another user. The environment has the coordinator's first invitation, or in an open run one for each user.
        ``liars``: somebody deserves to be quarantined; where all are honest, the end of the block fails if anybody was."""
        self.folder = folder
        self.run_file = folder / "run.toml"
        self.run_file.write_text(run)
        write_corpus(folder)
        self.store = store or f"sqlite:///{folder}/store.db"
        self.address = address or f"127.0.0.1:{free_port()}"
        self.invitation = ""
        self._start = start
        self._place = place
        self._faults: list[Fault] | None = None if faults is None else []
        self._started: list[tuple[str, Process]] = []
        self._opened: list[int] = []
        self._orders: dict[str, int] = {}  # by process: the pipe through which it learns of later faults
        for fault in faults or ():
            self.inject(fault)
        self._fresh = fresh
        self._first = nodes
        self._invited = invited
        self._liars = liars
        self._coordinator = coordinator or ("tests.cluster.alike" if alike else "dtfm.coordinator.cli")
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
        for opened in self._opened:
            os.close(opened)
        if error is not None:
            for name, process in self._started:
                print(f"--- {name}\n{process.errors[-3000:]}", file=sys.stderr)
        elif not self._liars:
            assert not self.of("node_quarantined")

    def start_coordinator(self, *options: str, exits: bool = True) -> None:
        """Starts the coordinator. A later call, after the first one has ended, uses the same store and
        address. Without an ``address``, the store remembers one. ``exits``: it ends with the run."""
        begun = len(self.events)
        self.coordinator = self.start_another(self.address, *options, exits=exits)
        listening = self.wait_for("listening", after=begun)
        self.address = listening["address"]
        self.invitation = listening["invitation"] or self.invitation

    def start_another(self, address: str, *options: str, exits: bool = True) -> Process:
        """Starts one more coordinator with the same store, and does not wait for it."""
        command = [sys.executable, "-m", self._coordinator, "serve", str(self.run_file)]
        command += ["--listen", address] if address else []
        command += ["--store", self.store, "--json", "--verbose", *(["--exit-when-over"] if exits else []), *options]
        return self._process(COORDINATOR, command, on_line=self._heard)

    def add(self, name: str, *options: str, environment: dict[str, str] | None = None) -> Process:
        command = [*join_command(self._shown(name), name), "--give-up-after", "20", *options]
        process = self._process(name, command, environment={**self._user(name), **(environment or {})})
        self.nodes[name] = process
        return process

    def add_relay(self, name: str) -> Process:
        """Starts a relay, which computes nothing."""
        command = [sys.executable, "-m", "dtfm.node.cli", "relay", *self._shown(name), "--id", name]
        process = self._process(name, [*command, "--give-up-after", "20", "--verbose"], environment=self._user(name))
        self.nodes[name] = process
        return process

    def _shown(self, name: str) -> list[str]:
        """What a node's command is told of the coordinator, beside its environment."""
        return [] if self._is_invited(name) else [self.address]

    def _is_invited(self, name: str) -> bool:
        return self._invited if isinstance(self._invited, bool) else name in self._invited

    def _user(self, name: str) -> dict[str, str]:
        """The environment of whoever starts the node."""
        if not self._is_invited(name):
            return {}
        return {
            "XDG_STATE_HOME": str(self.folder / f"state-{name}"),
            "DTFM_INVITATION": self.invite()["invitation"]
            if 'mode = "open"' in self.run_file.read_text()
            else self.invitation,
            "DTFM_ALLOW_DATA": str(self.folder),
        }

    def invite(self, *options: str) -> dict[str, Any]:
        """An invitation of its own, as each key needs it in an open run."""
        said: list[bytes] = []
        command = [sys.executable, "-m", "dtfm.coordinator.cli", "invite", self.address, "--json", *options]
        process = Process(self._place(COORDINATOR, command), self.folder, on_line=said.append)
        assert process.wait(60) == 0, process.errors
        invited: dict[str, Any] = json.loads(said[0])
        return invited

    def inject(self, fault: Fault) -> None:
        """From now on ``fault`` waits for its moment, in the process of its name that runs now or in a later one."""
        assert self._faults is not None, "this cluster was not prepared for faults"
        self._faults.append(fault)
        if fault.means is HOLD:
            os.mkfifo(self.folder / gate(fault))
        if fault.process in self._orders:
            os.write(self._orders[fault.process], f"{to_text([fault])}\n".encode())

    def let_go(self, hold: Fault) -> None:
        """Opens the gate of ``hold``: the process that waits there goes on, and nobody waits there again."""
        self._opened.append(os.open(self.folder / gate(hold), os.O_RDWR))  # O_WRONLY would wait for a reader

    def wait_for(
        self, event: str, *, where: Callable[[Event], bool] = lambda _: True, after: int = 0, timeout: float = 60
    ) -> Event:
        """Returns the first event of that name for which ``where`` holds, from event number ``after`` on. Fails when the
        coordinator ends before such an event, or when for ``timeout`` seconds no event comes but steps and evaluations. So a busy
        machine, on which nodes take long to start, has the time that it needs.
        """
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
                    if _tells(found):
                        deadline = time.monotonic() + timeout
                if ended or time.monotonic() > deadline:
                    break
                self._changed.wait(0.5)  # an event wakes it; the coordinator's death does not
        why = "the coordinator ended" if ended else f"nothing for {timeout:.0f} s"
        last = [f"{e['event']} {e.get('node', '')} {e.get('reason', '')}" for e in self.events if _tells(e)][-8:]
        steps = [e["step"] for e in self.of("step_committed")[-1:]]
        told = "\n  ".join(last)
        raise AssertionError(
            f"waited for {event}: {why}; the last step is {steps}, the last other events were\n  {told}\n"
            f"{self.coordinator.errors}"
        )

    def finish(self, timeout: float = 100) -> int:
        """Waits for the coordinator to end; returns its exit code. The nodes have then ended by themselves, or are ended if the
        run is not over: they would wait for the next coordinator."""
        assert self.coordinator is not None
        code = self.coordinator.wait(timeout)
        is_over = any(self.of(event) for event in ("run_finished", "run_failed", "run_stopped"))
        for process in self.nodes.values():
            if is_over:
                process.wait(20)
            else:
                process.close()
        return code

    def of(self, event: str) -> list[Event]:
        return [e for e in self.events if e["event"] == event]

    def log(self) -> list[Event]:
        """All events, as the store has them."""
        with Store(self.store, write=False) as store:
            return [record.to_json() for record in store.read()]

    def check(self) -> Checked:
        """What `dtfm-coordinator check` finds in the store."""
        with Store(self.store, write=False) as store:
            return checked(store.read())

    @property
    def losses(self) -> list[float]:
        return [e["loss"] for e in self.of("step_committed")]

    def _process(self, name: str, command: list[str], **options: Any) -> Process:
        faults = None if self._faults is None else self._faults_of(name, self._faults)
        fresh = self._fresh if isinstance(self._fresh, bool) else name in self._fresh
        process = Process(self._place(name, command), self.folder, faults=faults, fresh=fresh, **options)
        self._started.append((name, process))
        return process

    def _faults_of(self, name: str, faults: Sequence[Fault]) -> tuple[str, str]:
        """For the next process of that name: the faults that have not happened, and a new pipe for later ones."""
        happened = "".join(process.errors for started, process in self._started if started == name)
        waiting = [f for f in faults if f.process == name and announcement(f) not in happened]
        orders = self.folder / f"orders-{name}-{len(self._started)}"
        os.mkfifo(orders)
        self._orders[name] = os.open(orders, os.O_RDWR)
        self._opened.append(self._orders[name])
        return to_text(waiting), str(orders)

    def _heard(self, line: bytes) -> None:
        with self._changed:
            self.events.append(json.loads(line))
            self._changed.notify_all()
