"""Waiting for the store and its disk: a coordinator that is started while these cannot be used goes on once they can be."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from dtfm.coordinator.store.record import StoreAway
from dtfm.coordinator.store.store import Store

log = logging.getLogger(__name__)

NEEDED_BYTES = 1 << 20
"""What a start writes at most: the log's first events, SQLite's own files, and who may use the run."""
LOOK_SECONDS = 1.0
"""Seconds between two looks. No event says that a disk has room again, and nothing else runs yet."""
SAY_AGAIN_SECONDS = 60.0
"""Seconds after which the log says again what the run waits for."""


class _Said:
    """Says what the run waits for: first immediately, then once a minute."""

    def __init__(self) -> None:
        self._last: float | None = None

    def say(self, text: str, *details: object) -> None:
        if self._last is None or time.monotonic() - self._last >= SAY_AGAIN_SECONDS:
            self._last = time.monotonic()
            log.error(text, *details)


def wait_for_room(folders: Iterable[Path]) -> None:
    """Returns when all existing ``folders`` have room for a start's writes. Says once a minute which folder has none. Ignores
    folders that cannot be written for other reasons: the code that writes there says why."""
    there, said = [folder for folder in folders if folder.is_dir()], _Said()
    while full := next((folder for folder in there if _is_full(folder)), None):
        said.say("the disk is full: make room in %s. The run waits, and then goes on by itself", full)
        time.sleep(LOOK_SECONDS)


def open_store(url: str, *, waits: bool) -> Store:
    """Opens the store to write; ``waits`` as for Store. While its disk is full, or its database does not answer, says so once a
    minute and tries again. Raises StoreError for other problems."""
    said = _Said()
    while True:
        try:
            return Store(url, write=True, waits=waits)
        except StoreAway as away:
            said.say(
                "%s. The run waits, and then goes on by itself; if this is another store, end this and give --store",
                away,
            )
        time.sleep(LOOK_SECONDS)


def _is_full(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, NEEDED_BYTES)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False
