"""Before all tests: what they remember of coordinators is not mixed with what the developer's own commands do, the scheduler is
compiled, and PyTorch computes with one thread."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from dtfm.compiled_code import compile_apart

# Read when PyTorch is loaded, by tests and by the workers of xdist. The tensors of tests are small: of two threads one would spin
# while it waits for the other, on a core that another test needs. Nodes that tests start are told how many threads they have.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Read when huggingface_hub is loaded. Tests find all they need on this machine, and a name that is not there is asked of nobody:
# without a network the hub's library would try again for half a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell without job control starts `make test &` with SIGINT ignored, and nohup starts it with SIGHUP ignored. Children would
# inherit that, and ignore the signals that tests send them.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# How long an example takes says how busy the machine is. A test that hangs ends by its time-out.
settings.register_profile("quick", deadline=None, max_examples=15)
settings.register_profile("thorough", deadline=None, max_examples=200)  # for `make soak`
settings.load_profile("quick")


WITH_PROCESSES = ("tests/cluster/", "tests/attacks/", "tests/wan/", "tests/test_", "tests/coordinator/web/")
"""Where tests take seconds, as they start processes, networks or a browser."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives each worker of xdist a part of the long tests, to begin with. Workers take equal parts of the list, and then steal
    from each other. In alphabetical order one would have most long tests, and the last of them would run with nothing beside."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.nodeid.startswith(WITH_PROCESSES)]
    short = [item for item in items if not item.nodeid.startswith(WITH_PROCESSES)]
    items[:] = [
        item
        for worker in range(workers)
        for item in (
            *long[worker::workers],
            *short[len(short) * worker // workers : len(short) * (worker + 1) // workers],
        )
    ]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Has the scheduler compiled where a coordinator will plan. After a change to it that takes a minute, and several on a busy
    machine: the first test in which a coordinator waits for it would run out of time, and end the compiler with it."""
    planning = sys.modules.get("dtfm.scheduler.warm_up")
    if planning is not None and not session.config.option.collectonly and not planning.is_compiled():
        asyncio.run(compile_apart("dtfm.scheduler.warm_up"))


def pytest_sessionfinish() -> None:
    """Ends the database: a worker of xdist that takes long to end is killed, and leaves it running."""
    if (postgres := sys.modules.get("tests.postgres")) is not None:
        postgres.end()


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
