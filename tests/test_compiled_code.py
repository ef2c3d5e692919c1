"""Compiled code finds room, and is compiled by another process: `dtfm/compiled_code.py`."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtfm.compiled_code import compile_apart

PROGRAM = """
import os, sys
from pathlib import Path
from numba.core import caching
from dtfm import compiled_code

def refuse(self):
    raise OSError("read-only")

# As in an image whose files are root's, with a user who has no cache.
caching.InTreeCacheLocator.ensure_cache_path = refuse
caching.UserWideCacheLocator.ensure_cache_path = refuse
is_writable = compiled_code._is_writable
compiled_code._is_writable = lambda folder: str(folder).startswith(sys.argv[1]) and is_writable(folder)
from dtfm.scheduler.model.compiled import entry

def twice(x):
    return 2 * x

twice.__globals__["__name__"] = "twice"
assert entry()(twice)(2) == 4
kept = Path(os.environ["NUMBA_CACHE_DIR"])
assert any(kept.rglob("*.nbi")), kept
print(kept, oct(kept.stat().st_mode & 0o777))
"""


def run(tmp_path: Path, writable: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "NUMBA_CACHE_DIR": ""}
    return subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), writable],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_compiled_code_goes_to_the_users_state_where_numba_can_write_nowhere(tmp_path: Path) -> None:
    done = run(tmp_path, str(tmp_path))
    assert done.stdout == f"{tmp_path}/state/dtfm/compiled 0o700\n"
    assert done.stderr == ""


def test_where_nothing_can_be_written_the_fix_is_named(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run(tmp_path, "nowhere")
    told = failed.value.stderr.splitlines()[-1]
    assert told.startswith("ValueError: compiled code can be kept nowhere")
    assert f"{tmp_path}/state/dtfm/compiled can be written" in told
    assert "NUMBA_CACHE_DIR" in told


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe to which the module ``slow`` writes its process's number when it is imported."""
    os.mkfifo(tmp_path / "begun")
    (tmp_path / "slow.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'begun')!r}, 'w').write(str(os.getpid()))\n"
        "def warm_up():\n    time.sleep(100)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path / "begun"


async def test_one_process_compiles_at_a_time_and_ends_when_nobody_waits_for_it(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    work = asyncio.create_task(compile_apart("slow"))
    process = int(await asyncio.to_thread(begun.read_text))
    with (tmp_path / "kept" / "slow.lock").open("ab") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_where_nothing_can_be_locked_nobody_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "quick.lock").mkdir()
    await compile_apart("quick")


async def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be /tmp, with a numba.py that another user has put there."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    await compile_apart("trap")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("folder", ["dtfm", "coordinator", "kernels", "node", "protos", "scheduler"])
def test_every_python_that_is_started_leaves_the_current_folder_out(folder: str) -> None:
    started = [
        path
        for path in (Path(__file__).parents[1] / folder).rglob("*.py")
        for options in re.findall(r"sys\.executable,\s*(.*)", path.read_text())
        if not options.startswith('"-P"')
    ]
    assert started == []


@pytest.mark.parametrize(("named", "expected"), [(None, "x86-64-v3"), ("skylake", "skylake")])
def test_what_is_compiled_runs_on_other_processors_too(tmp_path: Path, named: str | None, expected: str) -> None:
    """Numba keeps with each function which processor it is for."""
    program = (
        "from dtfm.compiled_code import find_room; find_room(); import os, numba; "
        "twice = numba.njit('int64(int64)')(lambda x: 2 * x); "
        "print(twice(2), *twice.targetctx.codegen().magic_tuple()[1:2], os.environ['NUMBA_CPU_NAME'])"
    )
    told = {"NUMBA_CPU_NAME": named} if named else {}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU")} | told
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["4", expected, expected], done.stderr
