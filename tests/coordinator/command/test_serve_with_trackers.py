"""``serve`` as a process whose run file names Weights & Biases: without a key, and with a server that never answers."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.store import Store
from dtfm.protos.run_file.run_file import RunFile

RUN = '[track]\nto = ["wandb:p"]\n'


@contextmanager
def serve(folder: Path, **environment: str) -> Iterator[Popen[str]]:
    """In this folder, which is its home too. Standard error goes into the same pipe as standard output."""
    (folder / "run.toml").write_text(RUN)
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    program = (
        sys.executable,
        "-m",
        "dtfm.coordinator.cli",
        "serve",
        "run.toml",
        "--listen",
        "127.0.0.1:0",
        "--no-page",
    )
    env = {**known, "HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    with Popen(program, cwd=folder, env=env, stdout=PIPE, stderr=STDOUT, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            for left in librarys_processes(process.pid):
                os.kill(left, signal.SIGKILL)


def librarys_processes(pid: int) -> Iterator[int]:
    """What the wandb library has started for the process with this id."""
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = each.read_bytes().split(b"\0")
            if b"wandb-core" in words[0] and str(pid).encode() in words:
                yield int(each.parent.name)


def said(process: Popen[str], text: str) -> str:
    """Reads until a line has this text."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"it has ended, and never said {text!r}")


def begin(folder: Path) -> None:
    with Store(f"sqlite:///{folder / 'dtfm.db'}", write=True) as store:
        store.append([ev.RunStarted("0123456789abcdef", RunFile().model_dump(mode="json"))])


@pytest.mark.soak
def test_without_a_key_no_run_begins_and_one_that_has_begun_goes_on(tmp_path: Path) -> None:
    with serve(tmp_path) as process:
        line = said(process, "wandb")
        assert line.startswith("dtfm-coordinator: track.to: wandb has no key; set WANDB_API_KEY to the one at ")
        assert process.wait() == 2
    begin(tmp_path)
    with serve(tmp_path) as process:
        assert "wandb:p gets no curves: wandb has no key; " in said(process, "gets no curves")
        said(process, "waiting")
        process.terminate()
        assert "dtfm-coordinator events --to wandb:p" in said(process, "does not have the end of the curves")
        assert process.wait() == 1


@pytest.mark.soak
def test_a_server_that_never_answers_does_not_hold_up_the_end(tmp_path: Path) -> None:
    begin(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with serve(tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY="a" * 40) as process:
            connection, _ = silent.accept()
            process.terminate()
            assert "dtfm-coordinator events --to wandb:p" in said(process, "does not have the end of the curves")
            assert process.wait() == 1
            connection.close()
