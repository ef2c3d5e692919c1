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

Event = dict[str, Any]
ROOT = Path(__file__).parents[2]


class Process:
    """One child process. ``output`` is what it has printed, both streams."""

    def __init__(self, command: list[str], folder: Path, log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self.popen = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONPATH": str(ROOT),
                    **(environment or {}),
                },
                start_new_session=True,
            )

    @property
    def stdout(self) -> IO[bytes]:
        assert self.popen.stdout is not None
        return self.popen.stdout

    @property
    def errors(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        return self.popen.wait(timeout)

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(10)
        self.stdout.close()


class Cluster:
    """``with Cluster(folder, run) as cluster``: a coordinator that serves ``run`` (TOML); nodes join with ``add``.

    Leaving the block ends every process.
    """

    def __init__(self, folder: Path, run: str, *, serve: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.run_file = folder / "run.toml"
        self.run_file.write_text(run)
        self._serve = serve
        self.events: list[Event] = []
        self.nodes: dict[str, Process] = {}
        self._changed = threading.Condition()

    def __enter__(self) -> Cluster:
        self.start_coordinator()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.nodes.values(), self.coordinator):
            process.close()
        self._reader.join(10)
        if error is not None:  # what a person would look at first
            for name, process in (("coordinator", self.coordinator), *self.nodes.items()):
                print(f"--- {name}\n{process.errors[-3000:]}", file=sys.stderr)

    def start_coordinator(self, *options: str) -> None:
        """Serves the run; a second call, after the first one ended, with the same store and address."""
        listen = getattr(self, "address", "127.0.0.1:0")
        command = [sys.executable, "-m", "dtfm.coordinator.cli", "serve", str(self.run_file), "--listen", listen]
        command += ["--store", f"sqlite:///{self.folder}/store.db", "--json", "--verbose", *self._serve, *options]
        self.coordinator = Process(command, self.folder, self.folder / "coordinator.log")
        self._reader = threading.Thread(target=self._read, args=(self.coordinator,), daemon=True)
        self._reader.start()
        self.address = self.wait_for("listening", timeout=60)["address"]

    def add(self, name: str, *options: str, environment: dict[str, str] | None = None) -> Process:
        command = [sys.executable, "-m", "dtfm.node.cli", "join", self.address, "--id", name, "--threads", "1"]
        command += ["--device", "cpu", "--give-up-after", "20", "--verbose", *options]
        process = Process(command, self.folder, self.folder / f"{name}.log", environment)
        self.nodes[name] = process
        return process

    def wait_for(
        self, event: str, *, where: Callable[[Event], bool] = lambda _: True, after: int = 0, timeout: float = 60
    ) -> Event:
        """The first event of that name, from number ``after`` on, for which ``where`` holds; waits for it. Ends early, with an
        error, when the coordinator does."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for found in self.events[after:]:
                    if found["event"] == event and where(found):
                        return found
                left = deadline - time.monotonic()
                ended = not self._reader.is_alive()
                if left <= 0 or ended:
                    last = [e["event"] for e in self.events[-5:]]
                    why = "the coordinator ended" if ended else f"nothing for {timeout:.0f} s"
                    raise AssertionError(
                        f"waited for {event}: {why}; the last events were {last}\n{self.coordinator.errors}"
                    )
                self._changed.wait(min(left, 1.0))

    def finish(self, timeout: float = 100) -> int:
        """Waits for coordinator and nodes to end by themselves; the coordinator's exit code."""
        code = self.coordinator.wait(timeout)
        self._reader.join(10)
        for process in self.nodes.values():
            process.wait(20)
        return code

    def of(self, event: str) -> list[Event]:
        return [e for e in self.events if e["event"] == event]

    @property
    def losses(self) -> list[float]:
        return [e["loss"] for e in self.of("step_committed")]

    def _read(self, process: Process) -> None:
        for line in process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
