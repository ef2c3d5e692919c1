"""Tokens that the nodes of one machine share: one node makes them, the others wait and then map the same file.

Each file is the tokens, and at its end their BLAKE3. A node keeps the file locked (shared) while it maps the file, so that
others know which files may be removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from dtfm.file_lock import PAUSE_SECONDS, try_lock

log = logging.getLogger(__name__)

MOST_UNUSED = 2
"""The number of unused texts to keep, for nodes that are started again."""
UNUSED_SECONDS = 7 * 86_400.0
_DIGEST_BYTES = 32
_SAY_SECONDS = 10.0
_LOOK_SECONDS = 10.0
"""Most seconds to wait for others that look whether a file is used. Each locks it for a moment to look."""


def shared(
    folder: Path, name: str, dtype: np.dtype[Any], make: Callable[[BinaryIO], blake3], *, lasting: bool
) -> NDArray[Any]:
    """The tokens (1-D) called ``name``. If they are missing, ``make`` writes them and returns the digest of their bytes.

    ``lasting``: the name says all that the tokens depend on. Otherwise they count only while another process uses them. Raises
    OSError, for example if the disk is full, and the exceptions of ``make``.
    """
    path = folder / f"{name}.tokens"
    lock = _wait_for(folder / f"{name}.lock")
    try:
        found = _mapped(path, dtype) if lasting or _is_used(path) else None
        if found is None:
            _make(path, make)
            found = _mapped(path, dtype)
            if found is None:
                raise OSError(
                    errno.EIO, "the file just written there is damaged, or another process keeps it locked", str(path)
                )
        os.utime(path)
        _tidy(folder, path)
        return found
    finally:
        os.close(lock)


def is_usable(folder: Path) -> bool:
    """Whether this process can make and lock files there."""
    try:
        lock = try_lock(folder / "usable", shared=True)
    except ValueError as problem:
        log.warning("the nodes on this machine cannot share the data: %s", problem)
        return False
    if lock is not None:
        os.close(lock)
    return True


def _wait_for(path: Path) -> int:
    said = -_SAY_SECONDS
    while (lock := try_lock(path)) is None:
        if time.monotonic() - said > _SAY_SECONDS:
            said = time.monotonic()
            log.info("another node on this machine is reading the data; waiting for it")
        time.sleep(PAUSE_SECONDS)
    return lock


def _make(path: Path, make: Callable[[BinaryIO], blake3]) -> None:
    for left in path.parent.glob(f"{path.stem}-*.part"):  # left by a killed process: the name's lock is ours
        left.unlink()
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
    try:
        with open(handle, "wb") as file:
            file.write(make(file).digest())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The tokens of the file. None if the file is missing or damaged, or if another process locks it for longer than a look
    takes."""
    if not path.exists():
        return None
    deadline = time.monotonic() + _LOOK_SECONDS
    while (descriptor := try_lock(path, shared=True)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(PAUSE_SECONDS)
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size - _DIGEST_BYTES
        if size < 0 or size % dtype.itemsize:
            return None
        # The mapping holds the file, and so its lock.
        whole = np.memmap(file, np.uint8, "r")
    content = whole[:size]
    if blake3(content.data, max_threads=blake3.AUTO).digest() != whole[size:].tobytes():
        log.warning("%s is damaged; reading the data again", path)
        return None
    let_go(content)
    return content.view(dtype)


def _is_used(path: Path) -> bool:
    if not path.exists():
        return False
    if (descriptor := try_lock(path)) is None:
        return True
    os.close(descriptor)
    return False


def _tidy(folder: Path, keep: Path) -> None:
    """Removes unused files, except a few recent ones."""
    with contextlib.suppress(OSError):
        for part in (*folder.glob("*.part"), *folder.glob("*.files")):
            if time.time() - part.stat().st_mtime > UNUSED_SECONDS:
                part.unlink()
        others = sorted(folder.glob("*.tokens"), key=lambda path: -path.stat().st_mtime)
        used = {_text(keep)} | {_text(path) for path in others if path != keep and _is_used(path)}
        unused = list(dict.fromkeys(_text(path) for path in others if _text(path) not in used))
        for path in others:
            if _text(path) in unused[MOST_UNUSED:] or (
                _text(path) in unused and time.time() - path.stat().st_mtime > UNUSED_SECONDS
            ):
                path.unlink()
                path.with_suffix(".lock").unlink(missing_ok=True)


def _text(path: Path) -> str:
    """What all chapters of a text have in their names."""
    return path.stem.rpartition("-")[0] or path.stem


def let_go(tokens: NDArray[Any]) -> None:
    """Takes the pages of mapped tokens out of this process's memory. They are read again where they are used."""
    held: Any = tokens
    while held is not None and not isinstance(held, mmap.mmap):
        held = getattr(held, "base", None)
    if held is not None and hasattr(mmap, "MADV_DONTNEED"):
        held.madvise(mmap.MADV_DONTNEED)
