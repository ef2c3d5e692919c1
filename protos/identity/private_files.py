"""Files that only their owner may read: keys, and what else opens doors."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

MOST_BYTES = 1 << 16


NAME_A_FOLDER = "name a folder that this user may write: {}=DIR, or HOME=DIR"
NAME_A_STATE_FOLDER = NAME_A_FOLDER.format("XDG_STATE_HOME")
"""What to do where the state folder cannot be used."""


def state_folder() -> Path:
    """Where this user's programs keep what must outlive them (XDG base directory specification). Raises ValueError."""
    return _folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    """Where they keep what can be made again. Raises ValueError."""
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, usual: str) -> Path:
    try:
        return Path(os.environ.get(variable) or Path.home() / usual) / "dtfm"
    except RuntimeError:  # as in a container that runs under a bare number
        raise ValueError(
            f"user {os.getuid()} has no name and no home folder here; {NAME_A_FOLDER.format(variable)}"
        ) from None


def write_private(path: Path, content: bytes, fix: str = "make its folder writable") -> None:
    """Writes the file whole or not at all, with mode 0600; it is on disk when this returns. Raises ValueError, which tells the
    ``fix``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mkstemp's mode is 0600
        try:
            with open(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _flush_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; {fix}") from None


def _flush_folder(folder: Path) -> None:
    """The name of a file that was just moved is on disk only when its folder is (fsync(2))."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_private(path: Path) -> bytes:
    """The file's content. Raises FileNotFoundError, and ValueError if it cannot be read or others may read or change it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if mode := stat.S_IMODE(status.st_mode) & 0o077:
                raise ValueError(
                    f"{path} holds a key, and others than its owner have permissions to it ({mode:03o}); "
                    f"take them away: chmod 600 {path}"
                )
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES} bytes; it is none of dtfm's files")
    return content
