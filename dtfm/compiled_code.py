"""The code that Numba compiles: where it is kept, and how it is compiled before anybody waits for it.

Numba keeps it beside each source file, or in the user's cache where that folder cannot be written, or where NUMBA_CACHE_DIR says. What
it reads from there it runs, so the folder must belong to the user.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def find_room() -> None:
    """Gives Numba a folder of ours if it can write nowhere, which it would refuse: the user's state folder, or else a temporary
    one, with a warning. To be called before Numba compiles; processes that are started later use the same folder."""
    usual = [Path(__file__).parent / "kernels" / "__pycache__", _user("XDG_CACHE_HOME", ".cache") / "numba"]
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        usual.append(Path(named))
    if any(map(_is_writable, usual)):
        return
    kept = _user("XDG_STATE_HOME", ".local/state") / "dtfm" / "compiled"
    if _is_writable(kept):
        kept.chmod(0o700)
        _use(kept)
        return
    temporary = tempfile.mkdtemp(prefix="dtfm-compiled-")  # of mode 0700
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    log.warning(
        "compiled code cannot be kept, so each start compiles it again, for seconds: none of %s can be written; make one of them "
        "writable, or name another folder in NUMBA_CACHE_DIR",
        ", ".join(map(str, [*usual, kept])),
    )
    _use(Path(temporary))


async def compile_apart(module: str, niceness: int = 0) -> None:
    """Has another process import ``module``, and call its ``warm_up`` if it has one, which fills the cache: this process need only
    load the result. Where that fails, this one compiles. Of several that are asked for it, one compiles and the others wait.
    ``niceness``: how much more than this process it gives way to others.

    Compiling holds Python's interpreter for a third of a second at a time, during which no heartbeat is heard or sent. The other
    process ends when this is cancelled.
    """
    find_room()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dtfm.compiled_code", module),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal ends this process in order, and that ends the other
    )
    try:
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _compile(module: str) -> None:
    with open(lock_file(module), "ab") as lock:
        with contextlib.suppress(ImportError):  # Windows has no such locks; then each compiles
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        getattr(importlib.import_module(module), "warm_up", lambda: None)()


def lock_file(module: str) -> Path:
    """One for each user and module, which holds nothing."""
    folder = Path(tempfile.gettempdir()) / f"dtfm-compiling-{getattr(os, 'getuid', int)()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / module


def _use(folder: Path) -> None:
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    if (numba := sys.modules.get("numba")) is not None:  # it has read its environment
        numba.config.CACHE_DIR = str(folder)


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
