"""Where `dtfm-coordinator` and `dtfm-node` begin."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

START_AGAIN = 3
"""Exit code of one of several nodes whose device has failed, for its supervisor. By itself a node ends with 1 then."""


def endings() -> tuple[signal.Signals, ...]:
    """The signals that end a program in order. SIGHUP comes when ssh or a terminal closes. Where it is ignored, as under nohup, it
    stays ignored."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


@contextmanager
def heeding(end: Callable[[signal.Signals], None]) -> Iterator[None]:
    """A context on a running event loop: each signal of `endings` calls ``end``. SIGHUP calls it only if no other signal came
    before, since a shell repeats the SIGHUP of its terminal."""
    loop, heard = asyncio.get_running_loop(), False

    def hear(number: signal.Signals) -> None:
        nonlocal heard
        if heard and number == signal.SIGHUP:
            return
        heard = True
        end(number)

    def hang_up(_number: int, _frame: object) -> None:
        leave_terminal()  # before this thread writes its next line
        loop.call_soon_threadsafe(hear, signal.SIGHUP)

    heeded = endings()
    for number in heeded:
        if number == signal.SIGHUP:
            signal.signal(number, hang_up)
        else:
            loop.add_signal_handler(number, hear, number)
    try:
        yield
    finally:
        for number in heeded:
            if number == signal.SIGHUP:
                signal.signal(number, signal.SIG_DFL)
            else:
                loop.remove_signal_handler(number)


def leave_terminal() -> None:
    """After SIGHUP: discards all output to the terminal, since each write to it would fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        with suppress(OSError):  # it was closed before
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
    os.close(nowhere)


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """A context for imports, in which Ctrl-C ends the process at once. There is nothing to put in order yet, and an import that
    KeyboardInterrupt breaks off shows a traceback, or goes on."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def coordinator() -> None:
    _run("dtfm.coordinator.cli")


def node() -> None:
    _run("dtfm.node.cli")


def _run(cli: str) -> None:
    with ended_by_ctrl_c():
        main = import_module(cli).main
    main()
