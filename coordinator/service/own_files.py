"""The coordinator's own copies of the data's files, where the run file's paths lead to some on this machine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dtfm.protos.places import is_remote_url
from dtfm.protos.run_file.data_tables import Data
from dtfm.protos.run_file.records import HUB, STANDARD_LIBRARY
from dtfm.protos.source_files import Files, described, names_on_disk

log = logging.getLogger(__name__)


def own_files(data: Data) -> Files:
    """Describes the files of each source that are on this machine. Empty if there are none. Raises OSError and ValueError."""
    number = len(data.places) + bool(data.held_out_split and not data.held_out)  # as nodes count them
    return described([*_here(data)], number)


def _here(data: Data) -> Iterator[tuple[str, list[Path]]]:
    """The key and the files of each source. Another Python's library is no file of the run's."""
    for key, place in data.places:
        if place == STANDARD_LIBRARY or place.startswith((HUB, "module:")) or is_remote_url(place):
            continue
        files = [path for path in map(Path, names_on_disk(place)) if path.is_file()]
        if files:
            yield key, files


def describe_own_files(data: Data, tell: Callable[[Files], object]) -> None:
    """Has a thread describe the files, which may take minutes, and ``tell`` of them if there are some. The end of the process
    does not wait for the thread."""

    def work() -> None:
        try:
            if found := own_files(data):
                tell(found)
        except (OSError, ValueError, RuntimeError) as problem:  # the last one: the loop has ended
            log.warning("the coordinator's own copies of the data cannot be read: %s", problem)

    threading.Thread(target=work, name="own files", daemon=True).start()
