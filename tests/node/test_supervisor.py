"""Processes for several devices: how they end, and what is said of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes, os, signal, sys
from dtfm.node import supervisor
supervisor.PRELOADED = ()
supervisor.LEAST_SECONDS = float(os.environ.get("LEAST_SECONDS", "60"))

def member(number):
    do = sys.argv[1 + number]
    if do == "waits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("waiting", flush=True)
        signal.pause()
    if do == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "fails once":
        if not os.path.exists(sys.argv[-1]):
            open(sys.argv[-1], "w").close()
            return 3
        print("again", flush=True)
        return 0
    if do == "raises":
        raise RuntimeError("a bug\\nof two lines")
    if do == "leaves an orphan":
        if (orphan := os.fork()) == 0:
            os._exit(3)
        os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
        os._exit(0)
    return int(do)

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: it inherits orphans, as process 1 of a container does
sys.exit(supervisor.supervise([f"d{n}" for n in range(len(sys.argv) - 1 - ("fails once" in sys.argv))], member))
"""


def start(*members: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", PROGRAM, *members]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[str]]:
    """A supervisor of two members that wait, and one that has died."""
    with start("waits", "dies", "waits") as running:
        assert running.stdout is not None
        assert sorted(running.stdout.readline() for _ in range(2)) == ["[d0] waiting\n", "[d2] waiting\n"]
        yield running
        running.kill()


def test_a_signal_is_passed_on_and_one_that_died_has_left_the_others_alone(waiting: subprocess.Popen[str]) -> None:
    assert waiting.stderr is not None
    assert waiting.stderr.readline() == "[d1] has ended: killed by SIGKILL; d0, d2 go on\n"
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(20) == 1
    first, last = waiting.stderr.readlines()
    assert " has ended: the run is complete, or it left in order; d" in first
    assert last.endswith(" has ended: the run is complete, or it left in order\n")


def test_members_leave_in_order_when_their_supervisor_is_killed(waiting: subprocess.Popen[str]) -> None:
    assert waiting.stdout is not None
    waiting.kill()
    assert waiting.stdout.read() == ""  # it ends when the last member has closed it


@pytest.mark.parametrize(("members", "code"), [(("0", "0"), 0), (("0", "2", "1"), 2), (("raises", "0"), 1)])
def test_the_largest_exit_code_counts(members: tuple[str, ...], code: int) -> None:
    _, errors = (running := start(*members)).communicate(timeout=30)
    assert running.returncode == code
    assert all(line.startswith("[d") for line in errors.splitlines()), errors
    if "raises" in members:
        assert "[d0] RuntimeError: a bug\n[d0] of two lines\n" in errors


def test_an_orphan_that_it_inherits_is_reaped_and_is_no_member() -> None:
    with start("leaves an orphan", "waits") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == "[d1] waiting\n"
        assert running.stderr.readline().startswith("[d0] has ended: the run is complete")
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
        assert running.stderr.read().splitlines() == ["[d1] has ended: the run is complete, or it left in order"]


@pytest.mark.parametrize(("least", "code"), [(0, 0), (60, 1)], ids=["it had worked", "it fails at the start"])
def test_one_whose_device_has_failed_is_started_again_if_it_had_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, code: int
) -> None:
    monkeypatch.setenv("LEAST_SECONDS", str(least))
    output, errors = (running := start("0", "fails once", str(tmp_path / "failed"))).communicate(timeout=30)
    assert running.returncode == code
    assert output == ("" if code else "[d1] again\n")
    assert ("[d1] its device has failed; it is started again\n" in errors) is not bool(code)


JOINING = """
import os, sys
from dtfm.node import supervisor
from dtfm.node.command import join
from dtfm.node.host import device, named_devices

supervisor.PRELOADED = ()
join.place_of = lambda *_: ("127.0.0.1:0", (), "127.0.0.1", False)
named_devices._count_gpus = lambda: 2

def opened(name, asked):
    print(f"{asked} is {name}, and sees {os.environ['CUDA_VISIBLE_DEVICES']} alone", flush=True)
    raise ValueError("no such GPU")

device.open_device = opened
from dtfm.node.cli import main
sys.argv = ["dtfm-node", "join", "127.0.0.1:1", "--id", "box", "--device", sys.argv[1]]
main()
"""


@pytest.mark.parametrize(
    ("devices", "seen"),
    [
        ("all", ["[cuda0] cuda:0 is cuda:0, and sees 5", "[cuda1] cuda:1 is cuda:0, and sees 2"]),
        pytest.param("cuda:1", ["cuda:1 is cuda:0, and sees 2"], marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_each_node_sees_its_own_gpu_alone(devices: str, seen: list[str], tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "5,2",
        "XDG_STATE_HOME": str(tmp_path),
        "HOME": str(tmp_path),
    }
    line = [sys.executable, "-c", JOINING, devices]
    done = subprocess.run(line, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{line} alone" for line in seen], done.stderr
