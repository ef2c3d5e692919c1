"""The code that Numba compiles: where it is kept, and how it is compiled before anybody waits for it.

Numba keeps it beside each source file, or in the user's cache where that folder cannot be written, or where NUMBA_CACHE_DIR says. What
it reads from there it runs, so the folder must belong to the user.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import importlib
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

WAIT_SECONDS = 180.0
"""Most seconds for another process to compile the same: several times what that takes on a slow machine."""
OF_V3 = ("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
"""What Linux says of a processor with x86-64-v3; it implies the rest."""
PAUSE_SECONDS = 0.05
"""Between two looks at a lock that another process has."""


def find_room() -> Path:
    """Gives Numba a folder of ours if it can write nowhere, which it would refuse: the user's state folder, or else a temporary
    one, with a warning. Has it compile for many processors. To be called before Numba compiles; processes that are started later
    do the same. Returns the folder, or the first of those in which Numba keeps code."""
    _compile_for_many()
    named = os.environ.get("NUMBA_CACHE_DIR")
    usual = [Path(named)] if named else []  # in Numba's order
    usual += [Path(__file__).parent / "kernels" / "__pycache__", _user("XDG_CACHE_HOME", ".cache") / "numba"]
    if (room := next(filter(_is_writable, usual), None)) is not None:
        return room
    kept = _user("XDG_STATE_HOME", ".local/state") / "dtfm" / "compiled"
    if _is_writable(kept):
        kept.chmod(0o700)
        _use(kept)
        return kept
    temporary = tempfile.mkdtemp(prefix="dtfm-compiled-")  # of mode 0700
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    log.warning(
        "compiled code cannot be kept, so each start compiles it again, for seconds: none of %s can be written; make one of them "
        "writable, or name another folder in NUMBA_CACHE_DIR",
        ", ".join(map(str, [*usual, kept])),
    )
    _use(Path(temporary))
    return Path(temporary)


async def compile_apart(module: str, niceness: int = 0) -> None:
    """Has another process import ``module``, and call its ``warm_up`` if it has one, which fills the cache: this process need only
    load the result. Where that fails, this one compiles. Of several that are asked for it, one compiles and the others wait for it,
    but not for ever. ``niceness``: how much more than this process it gives way to others.

    Compiling holds Python's interpreter for a third of a second at a time, during which no heartbeat is heard or sent. The other
    process ends when this is cancelled.
    """
    find_room()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "dtfm.compiled_code", module),  # -P: nothing is imported from the current folder
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal ends this process in order, and that ends the other
    )
    try:
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        assert process.stdout is not None
        async for line in process.stdout:
            log.warning("%s", line.decode(errors="replace").rstrip())
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _compile(module: str) -> None:
    """What it prints, the process that waits for this one logs."""
    with open(lock_file(module), "ab") as lock:
        if not _locked(lock):
            print(
                f"another process has had {lock.name} for {WAIT_SECONDS:.0f} s, in which it should have compiled {module}; "
                "compiling it here too",
                flush=True,
            )
        getattr(importlib.import_module(module), "warm_up", lambda: None)()


def _locked(file: IO[bytes]) -> bool:
    """Whether it could be locked in the time that others may take to compile."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_SECONDS)
        else:
            return True


def lock_file(module: str) -> Path:
    """One for each module, which holds nothing. It is in the folder of the compiled code, where no other user may make files."""
    return find_room() / f"{module}.lock"


def _compile_for_many() -> None:
    """On a processor with all of x86-64-v3 (since 2013), what is compiled runs on the others, and an image needs to hold it once."""
    if "NUMBA_CPU_NAME" in os.environ:
        return
    with contextlib.suppress(OSError):  # not Linux
        if set(OF_V3) <= set(Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].split()):
            _set(CPU_NAME="x86-64-v3", CPU_FEATURES="")


def _use(folder: Path) -> None:
    _set(CACHE_DIR=str(folder))


def _set(**settings: str) -> None:
    """Settings of Numba's, for this process and those that it starts."""
    for name, value in settings.items():
        os.environ[f"NUMBA_{name}"] = value
        if (numba := sys.modules.get("numba")) is not None:  # it has read its environment
            setattr(numba.config, name, value)


def _is_writable(folder: Path) -> bool:
    """Whether files can be made there, after making the folder if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _user(variable: str, usual: str) -> Path:
    """A folder of this user's by the XDG base directory specification."""
    if named := os.environ.get(variable):
        return Path(named)
    try:
        return Path.home() / usual
    except RuntimeError:  # a user without a home, as in some containers
        return Path("/nonexistent") / usual


if __name__ == "__main__":
    _compile(sys.argv[1])
