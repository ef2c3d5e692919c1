"""The code that Numba compiles: where it is kept, and how it is compiled before anybody waits for it.

Numba keeps it beside each source file, or in the user's cache where that folder cannot be written, or where NUMBA_CACHE_DIR says. What
it reads from there it runs, so the folder must belong to the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from dtfm.file_lock import locked

OF_V3 = ("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
"""What Linux says of a processor with x86-64-v3; it implies the rest."""


def find_room() -> Path:
    """Gives Numba a folder of ours if it can write nowhere, which it would refuse: in the user's state folder. Has it compile for
    many processors. To be called before Numba compiles; processes that are started later do the same. Returns the folder, or the
    first of those in which Numba keeps code. Raises ValueError if none can be written."""
    _compile_for_many()
    named = os.environ.get("NUMBA_CACHE_DIR")
    usual = [Path(named)] if named else []  # in Numba's order
    usual += [Path(__file__).parent / "kernels" / "__pycache__", _user("XDG_CACHE_HOME", ".cache") / "numba"]
    if (room := next(filter(_is_writable, usual), None)) is not None:
        return room
    kept = _user("XDG_STATE_HOME", ".local/state") / "dtfm" / "compiled"
    if not _is_writable(kept):
        raise ValueError(
            f"compiled code can be kept nowhere: none of {', '.join(map(str, [*usual, kept]))} can be written; make one of them "
            "writable, or name another folder in NUMBA_CACHE_DIR"
        )
    kept.chmod(0o700)
    _set(CACHE_DIR=str(kept))
    return kept


async def compile_apart(module: str, niceness: int = 0) -> None:
    """Has another process import ``module``, and call its ``warm_up`` if it has one, which fills the cache: this process need only
    load the result. Where that fails, this one compiles. Of several that are asked for it, one compiles at a time, and the others
    find what it has made. ``niceness``: how much more than this process it gives way to others.

    Compiling holds Python's interpreter for a third of a second at a time, during which no heartbeat is heard or sent. The other
    process ends when this is cancelled.
    """
    program = f"import importlib; getattr(importlib.import_module({module!r}), 'warm_up', lambda: None)()"
    with contextlib.suppress(ValueError):  # no file can be locked there, as on some network disks
        async with locked(find_room() / f"{module}.lock"):  # where no other user may make files
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", program),  # -P: nothing is imported from the current folder
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


def _compile_for_many() -> None:
    """On a processor with all of x86-64-v3 (since 2013), what is compiled runs on the others, and an image needs to hold it once."""
    if "NUMBA_CPU_NAME" in os.environ:
        return
    with contextlib.suppress(OSError):  # not Linux
        if set(OF_V3) <= set(Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].split()):
            _set(CPU_NAME="x86-64-v3", CPU_FEATURES="")


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
