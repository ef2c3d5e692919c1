"""Waiting for room on the disk: a coordinator that is started again while its disk is full goes on once there is room."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

NEEDED_BYTES = 1 << 20
"""What a start writes at most: the log's first events, SQLite's own files, and who may use the run."""
LOOK_SECONDS = 1.0
"""Seconds between two looks. No event says that a disk has room again, and nothing else runs yet."""
SAY_AGAIN_SECONDS = 60.0
"""Seconds after which the log says again that the disk is full."""


def wait_for_room(folders: Iterable[Path]) -> None:
    """Returns once each of the ``folders`` that exist has room for what a start writes. Says once a minute which one has none. A
    folder that cannot be written for another reason is left to whoever writes there."""
    there, said = [folder for folder in folders if folder.is_dir()], 0.0
    while full := next((folder for folder in there if _is_full(folder)), None):
        if not said or time.monotonic() - said >= SAY_AGAIN_SECONDS:
            said = time.monotonic()
            log.error("the disk is full: make room in %s. The run waits, and then goes on by itself", full)
        time.sleep(LOOK_SECONDS)


def _is_full(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, NEEDED_BYTES)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False
