"""Locks between the processes of this machine, which end with the process that has them, however it ends (flock(2))."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path

PAUSE_SECONDS = 0.05
"""Between two looks at a lock that another process has."""


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """Locks the file, which is made if need be. Returns a descriptor, and whoever closes it gives the lock up; None: another
    process has it, and not as a shared one. Raises ValueError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    except BlockingIOError:
        return None
    except OSError as error:
        raise ValueError(f"cannot lock {path}: {error.strerror}; make its folder writable") from None


@contextlib.asynccontextmanager
async def locked(path: Path) -> AsyncIterator[None]:
    """No other process is in such a block for the same file. Raises ValueError."""
    while (descriptor := try_lock(path)) is None:  # noqa: ASYNC110  (no event comes from another process)
        await asyncio.sleep(PAUSE_SECONDS)
    try:
        yield
    finally:
        os.close(descriptor)
