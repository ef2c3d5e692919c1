"""Processes that start in milliseconds: they are forked from one that has imported what a node and a coordinator need.

Importing torch and transformers takes seconds of processor time, which a test with six nodes would spend six times. A nursery is
a separate process that imports them once. On request it forks, and the child runs the real command with its own arguments,
environment, working folder, session and standard streams; exit codes and signals work as for any process. Two things differ. A
child has the nursery's sys.path and seed of string hashes. At its end it calls exit handlers and then leaves at once, as
finalising a thousand modules would take as long as a short run. So some tests still start fresh interpreters.

The nursery has one thread when it forks, as that is safe from no other state: it imports modules and warms up (warm_up.py), and
opens no connection. The processes that run tests share a nursery, since its imports can take half a minute. When one of them
ends, its children are killed. The nursery ends after the last one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MODULES = (
    "dtfm.node.cli",
    "dtfm.coordinator.cli",
    "tests.attacks.twisted",
    "tests.cluster.alike",
    "tests.cluster.asks_at_once",
    "tests.cluster.drawn",
    "tests.cluster.short_certificates",
    "tests.cluster.watched_loop",
    "tests.wan.given_plan",
    "tests.wan.slow_device",
)
"""A child runs ``main()`` of one of these."""

PRELOADED = (
    *MODULES,
    "tests.cluster.faults",
    "tests.cluster.warm_up",
    "dtfm.kernels.adamw",
    "dtfm.node.model.causal.language_model",
    "dtfm.node.session",
    "fsspec.implementations.local",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "numba",
    "sqlalchemy.dialects.sqlite.pysqlite",
)
_ROOT = Path(__file__).parents[2]
_LARGEST_MESSAGE = 1 << 17
_STATUS = struct.Struct("<i")
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Command:
    """``python -m module arguments`` in ``folder``. ``faults``: what faults.install takes, where the process is to fail: the
    faults as faults.to_text gives them, and the named pipe for later ones. ``network``: the file of a network namespace to
    run in."""

    module: str
    arguments: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    faults: tuple[str, str] | None = None
    network: str = ""


class Child:
    """A process that the nursery has forked, with the interface of subprocess.Popen."""

    def __init__(self, pid: int, pidfd: int, status: int) -> None:
        """``status``: a pipe on which the nursery writes how the process has ended. The child closes both descriptors."""
        self.pid = pid
        self._pidfd = pidfd
        self._status = status
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the process; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float) -> int:
        """Waits until the process has ended; returns what ``poll`` does. Raises subprocess.TimeoutExpired."""
        with self._lock:
            if self._code is None:
                if not select.select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
                said = os.read(self._status, _STATUS.size)
                self._code = _STATUS.unpack(said)[0] if said else -signal.SIGKILL  # it ended with the nursery
                os.close(self._status)
                os.close(self._pidfd)
            return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing if the process has ended."""
        with self._lock:
            if self._code is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """Starts importing at once, unless another process has started the nursery of that ``name``; ``fork`` waits until it is done.
    For any number of threads."""

    def __init__(self, name: str, preloaded: Sequence[str] = PRELOADED) -> None:
        address = f"\0dtfm nursery {name}"  # of Linux's abstract names, which are free again when nobody listens
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            try:
                listening.bind(address)
            except OSError as problem:
                if problem.errno != errno.EADDRINUSE:
                    raise
            else:
                listening.listen(64)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.cluster.nursery", str(listening.fileno()), *preloaded],
                    cwd=_ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(_ROOT)},
                    pass_fds=[listening.fileno()],
                    start_new_session=True,
                )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)

    def fork(self, command: Command, stdout: int, stderr: int) -> Child:
        """Starts a child that runs ``command`` and writes to these descriptors, which the caller still has to close."""
        reading, writing = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(asdict(command)).encode()], [stdout, stderr, writing])
                answer, handles, _, _ = socket.recv_fds(self._socket, _LARGEST_MESSAGE, 1)
        finally:
            os.close(writing)
        assert answer, "the nursery has ended"
        return Child(json.loads(answer)["pid"], handles[0], reading)

    def close(self) -> None:
        """Ends the children that still run, and the nursery if no other process uses it."""
        self._socket.close()
        if self._process is not None:
            self._process.wait(30)


_nursery: Nursery | None = None


def nursery() -> Nursery:
    """The nursery of these tests: the workers of xdist share one. The first call starts it."""
    global _nursery
    if _nursery is None:
        _nursery = Nursery(os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid()))
    return _nursery


def close_nursery() -> None:
    global _nursery
    if _nursery is not None:
        _nursery.close()
        _nursery = None


# In the nursery


def serve(listening: socket.socket) -> Callable[[], None] | None:
    """Forks on request until the last connection ends, and then returns None. The children of a connection that ends are killed.
    In a child it returns what that is to run."""
    wake, awake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(awake)
    # Without a handler, nothing would be written to the wake-up descriptor.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    connections: dict[int, socket.socket] = {}
    children: dict[int, tuple[int, int]] = {}
    """By process id: the descriptor for its report, and that of the connection which asked for it."""
    while True:
        readable, _, _ = select.select([listening.fileno(), wake, *connections], [], [])
        if wake in readable:
            os.read(wake, 4096)
            _reap(children)
        if listening.fileno() in readable:
            connection, _ = listening.accept()
            connections[connection.fileno()] = connection
        for asking in connections.keys() & set(readable):
            message, received, _, _ = socket.recv_fds(connections[asking], _LARGEST_MESSAGE, 3)
            if not message:
                connections.pop(asking).close()
                for pid in [pid for pid, (_, asked) in children.items() if asked == asking]:
                    os.kill(pid, signal.SIGKILL)
                    children[pid] = children[pid][0], -1
                continue
            stdout, stderr, report = received
            _assert_single_threaded()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                for inherited in (listening, *connections.values()):
                    inherited.detach()  # the child closes all inherited descriptors
                return _child(Command(**json.loads(message)), parent, stdout, stderr)
            children[pid] = report, asking
            pidfd = os.pidfd_open(pid)
            with contextlib.suppress(BrokenPipeError):  # its next turn is its end
                socket.send_fds(connections[asking], [json.dumps({"pid": pid}).encode()], [pidfd])
            for descriptor in (stdout, stderr, pidfd):
                os.close(descriptor)
        if not connections:
            return None


def _child(command: Command, parent: int, stdout: int, stderr: int) -> Callable[[], None]:
    """Turns this fork into an independent process; returns what it is to run."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the nursery ended before prctl
        os._exit(1)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    if command.network:
        _enter_network(command.network)
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    module = importlib.import_module(command.module)
    sys.argv = [str(module.__file__), *command.arguments]
    if command.faults:
        from tests.cluster import faults  # here, as only children use it

        text, orders = command.faults
        faults.install(faults.from_text(text), orders)
    main: Callable[[], None] = module.main
    return main


def _enter_network(path: str) -> None:
    """Raises OSError, for example when this process is not allowed to."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(path, os.O_RDONLY)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {path}")
    os.close(namespace)


def _reap(children: dict[int, tuple[int, int]]) -> None:
    """Reports the exit code of every child that has ended."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        report, _ = children.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(report, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(report)


def _assert_single_threaded() -> None:
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1 == threading.active_count(), (
        f"there are {len(threads)} threads; a fork would copy the locks that they hold"
    )


def _preload(modules: Sequence[str]) -> None:
    """Imports them, and calls those ``warm_up`` that have one."""
    imported = [importlib.import_module(module) for module in modules]
    for module in imported:
        getattr(module, "warm_up", lambda: None)()
    _assert_single_threaded()
    gc.collect()
    gc.freeze()  # a child's garbage collector does not write to these pages, so they stay shared


class _End:
    """The child's last exit handler, as it was registered first. By then, other handlers have run and threads have ended."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def run(self, main: Callable[[], None]) -> None:
        try:
            main()
            self._code = 0
        except SystemExit as ending:
            if ending.code is None or isinstance(ending.code, int):
                self._code = ending.code or 0
            raise

    def _leave(self) -> None:
        if self._code is not None:  # else this is the nursery, or the interpreter still has to print an error
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code & 0xFF)


def _main() -> None:
    end = _End()
    # Ctrl-C ends the tests, which then close the socket; the nursery must not end before them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        _preload(sys.argv[2:])
        main = serve(listening)
    if main is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end.run(main)


if __name__ == "__main__":
    _main()
