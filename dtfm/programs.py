"""Where `dtfm-coordinator` and `dtfm-node` begin."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


START_AGAIN = 3
"""Exit code of one of several nodes whose device has failed, for its supervisor. By itself a node ends with 1 then."""


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
