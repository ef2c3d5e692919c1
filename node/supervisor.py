"""Several devices of one machine: a node for each, in a process of its own, under one that supervises them.

The supervisor imports what nodes need, once, and then forks: so packages are read and kept in memory once. It has one thread
then, computes nothing and has not begun to use CUDA, which is when forking is safe. Nodes do not depend on each other: one that
ends leaves the others alone. It is not started again: the same cause may end it again and again at the others' cost. There is
one exception: if its device had worked and has failed, only a new process mends this.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from dtfm.programs import START_AGAIN, ended_by_ctrl_c, endings, leave_terminal

log = logging.getLogger(__name__)

PRELOADED = ("dtfm.node.session", "dtfm.node.model.causal.language_model")
"""What a node imports before it enrols, and what only once it knows the run. Each takes seconds."""

_MEANING = {
    0: "the run is complete, or it left in order",
    1: "the run failed, or the coordinator is gone",
    2: "bad input, or a refusal",
    START_AGAIN: "its device has failed, soon after it was started",
}
LEAST_SECONDS = 60.0
"""A node whose device has failed is started again only if it has lasted this long."""
_PR_SET_PDEATHSIG = 1


def supervise(labels: Sequence[str], member: Callable[[int], int]) -> int:
    """Runs ``member(number)`` for each label in a process of its own, and waits for all to end. Signals that end a program
    (see `endings`) are passed on. Returns the largest of their exit codes; 1 stands for a signal that nobody passed on.

    In the processes of members, raises the error of ``member``, or SystemExit with its exit code.
    """
    with ended_by_ctrl_c():
        for module in PRELOADED:
            importlib.import_module(module)
    gc.freeze()  # the members' garbage collectors do not write to these pages, so they stay shared
    running: dict[int, int] = {}  # numbers of members, by process
    began: dict[int, float] = {}
    passed_on = endings()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    supervisor, leaving = os.getpid(), False

    def start(number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
        if (pid := os.fork()) == 0:
            _become_member(labels[number], supervisor)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise SystemExit(member(number))
        running[pid], began[number] = number, time.monotonic()

    def pass_on(signalled: int, _frame: object) -> None:
        nonlocal leaving
        leaving = True
        if signalled == signal.SIGHUP:
            leave_terminal()
        for pid in running:
            os.kill(pid, signalled)  # none of them was waited for, so the numbers are theirs still

    for number in range(len(labels)):
        start(number)
    for signalled in passed_on:
        signal.signal(signalled, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    worst = 0
    while running:
        number, code = _next_end(running)
        if code == START_AGAIN and not leaving and time.monotonic() - began[number] >= LEAST_SECONDS:
            log.warning("[%s] its device has failed; it is started again", labels[number])
            start(number)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            continue
        worst = max(worst, 1 if code < 0 or code == START_AGAIN else code)
        why = _MEANING.get(code, f"exit code {code}") if code >= 0 else f"killed by {signal.Signals(-code).name}"
        others = ", ".join(labels[other] for other in running.values())
        rest = f"; {others} go{'es' if len(running) == 1 else ''} on" if others else ""
        log.warning("[%s] has ended: %s%s", labels[number], why, rest)
    return worst


def _next_end(running: dict[int, int]) -> tuple[int, int]:
    """The number of the next member to end, which is taken out of ``running``, and its exit code, or minus its signal."""
    while True:
        pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid  # type: ignore[union-attr]
        number = running.pop(pid, None)  # before its process may become another one
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if number is not None:  # else an orphan: process 1 of a container inherits those
            return number, code


def _become_member(label: str, supervisor: int) -> None:
    for number in endings():
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    os.setsid()  # a terminal's Ctrl-C comes by the supervisor alone
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # it leaves in order if the supervisor is killed
        if os.getppid() != supervisor:
            os._exit(1)
    sys.stdout, sys.stderr = _Labelled(sys.stdout, label), _Labelled(sys.stderr, label)


class _Labelled(io.TextIOBase):
    """Writes whole lines to ``stream``, each with the label before it."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream = stream
        self._label = f"[{label}] "
        self._begun = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            if lines:
                self._stream.write("".join(f"{self._label}{line}\n" for line in lines))
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding
