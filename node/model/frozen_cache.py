"""Packed frozen parameters on this machine's disk: a node that is started again reads nothing from the source.

Each model, packing and dtype has a folder. In the folder, a safetensors file for each parameter has its packed tensors and their
digest. A process keeps its folder's file "used" locked (shared), so that others know which folders may be removed. Only one
process at a time reads a parameter from the source; the others wait for it. Trouble with the disk never ends a run. It is
logged, and the parameters come from the source.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from dtfm.file_lock import PAUSE_SECONDS, try_lock
from dtfm.node.data.shared.cache import MOST_UNUSED, UNUSED_SECONDS

log = logging.getLogger(__name__)
Made = TypeVar("Made")

Parts = Mapping[str, torch.Tensor]
"""The tensors that a packed parameter consists of, by name, on the CPU."""

FORMAT = 1
_DIGEST = "blake3"
"""The name of the digest's tensor in a file."""
_USED, _LOCK = "used", "lock"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_LOOK_SECONDS = 10.0
"""The longest wait for another process that looks for room."""
_SAY_SECONDS = 10.0


class FrozenCache:
    """The packed parameters of one model. For any thread.

    The cache of all models takes at most as much of the disk as it leaves free. Of the models that no process uses, it keeps the
    last MOST_UNUSED for UNUSED_SECONDS, and fewer if room is short.
    """

    def __init__(self, root: Path, model: bytes) -> None:
        """``root``: the folder that this machine's processes share. ``model`` identifies the model, its packing and the dtype."""
        self._root = root
        self._folder = root / blake3(b"%d\n" % FORMAT + model).hexdigest(16)
        self._is_open = self._is_full = False
        self._bytes = 0  # of all files under the root, as of the last `begin` and with this process's later ones
        self._said = set[str]()  # the kinds of trouble that were logged
        self._turn = threading.Lock()

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Makes room for those of the parameters that are missing here. ``sizes``: their bytes, by name."""
        try:
            with self._alone():
                if not self._is_open:
                    if (use := try_lock(self._folder / _USED, shared=True)) is None:
                        raise OSError(errno.EBUSY, "another program keeps it locked", str(self._folder / _USED))
                    weakref.finalize(self, os.close, use)
                    self._is_open = True
                os.utime(self._folder)
                self._make_room(sum(size for name, size in sizes.items() if not self._path(name).exists()))
        except (OSError, ValueError) as problem:
            self._say("begin", "frozen weights are not kept on this machine's disk: %s", problem)

    @contextmanager
    def turn(self, name: str, goes_on: Callable[[], bool]) -> Iterator[None]:
        """In this context, no other thread and no other process reads the parameter from the source. Raises ValueError when
        ``goes_on`` returns False while another one has its turn."""
        lock = self._wait_for(name, goes_on) if self._is_open else None
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def find(self, name: str, make: Callable[[Parts, bytes], Made]) -> Made | None:
        """The result of ``make`` for the parameter's parts and their digest. None: they are missing or damaged, or ``make``
        raises ValueError."""
        path = self._path(name)
        try:
            content = path.read_bytes() if self._is_open else None
        except FileNotFoundError:
            return None
        except OSError as problem:
            self._say("read", "%s cannot be read (%s); its parameter comes from the source", path, problem)
            return None
        if content is None:
            return None
        try:
            parts = load(content)
            digest = bytes(parts.pop(_DIGEST, torch.empty(0)).tolist())
            if digest_of(parts) != digest:
                raise ValueError("its BLAKE3 differs")
            return make(parts, digest)
        except Exception as problem:  # whatever safetensors raises
            self._say("damage", "%s is damaged (%s); its parameter comes from the source", path, problem)
            return None

    def keep(self, name: str, parts: Parts, digest: bytes) -> None:
        """Writes the parameter's file if there is room. ``digest``: of the parts. In the parameter's `turn`."""
        if not self._is_open or self._is_full:
            return
        path, size = self._path(name), sum(part.nbytes for part in parts.values())
        try:
            if self._is_short(size):
                self._is_full = True
                self._say(
                    "room", "no more frozen weights are kept in %s: its disk has too little free space", self._root
                )
                return
            for left in self._folder.glob(f"{path.stem}-*.part"):  # by a killed process: the turn is ours
                left.unlink()
            handle, part = tempfile.mkstemp(dir=self._folder, prefix=f"{path.stem}-", suffix=".part")
            os.close(handle)
            try:
                save_file({**parts, _DIGEST: torch.frombuffer(bytearray(digest), dtype=torch.uint8)}, part)
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part)
                raise
            with self._turn:
                self._bytes += size
        except (OSError, SafetensorError) as problem:
            self._is_full = True
            self._say("write", "no more frozen weights are kept in %s: %s", self._root, problem)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """In this context, no other process looks for room. Raises OSError, and ValueError if no file can be locked here."""
        deadline = time.monotonic() + _LOOK_SECONDS
        while (lock := try_lock(self._root / _LOCK)) is None:
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, "another process keeps it locked", str(self._root / _LOCK))
            time.sleep(PAUSE_SECONDS)
        try:
            yield
        finally:
            os.close(lock)

    def _make_room(self, wanted: int) -> None:
        """Removes unused folders, the oldest first: those above the limits, and as many as ``wanted`` bytes need."""
        folders = sorted((each for each in self._root.iterdir() if _is_ours(each)), key=_last_use)
        unused = [each for each in folders if each != self._folder and not _is_used(each)]
        self._bytes, self._is_full = self._measured(), False
        while unused and (
            len(unused) > MOST_UNUSED or time.time() - _last_use(unused[0]) > UNUSED_SECONDS or self._is_short(wanted)
        ):
            shutil.rmtree(unused.pop(0), ignore_errors=True)
            self._bytes = self._measured()

    def _is_short(self, size: int) -> bool:
        """Whether the cache would take more than it leaves free, with ``size`` bytes more. Raises OSError."""
        return self._bytes + size > shutil.disk_usage(self._root).free - size

    def _measured(self) -> int:
        total = 0
        for file in self._root.glob("*/*"):
            with suppress(OSError):  # another process has removed or renamed it
                total += file.stat().st_size
        return total

    def _wait_for(self, name: str, goes_on: Callable[[], bool]) -> int | None:
        path, said = self._path(name).with_suffix(".lock"), time.monotonic()
        try:
            while (lock := try_lock(path)) is None:
                if not goes_on():
                    raise ValueError("this node is stopping")
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    self._say("wait", "another node on this machine is reading frozen weights; waiting for it")
                time.sleep(PAUSE_SECONDS)
        except ValueError as problem:
            if not goes_on():
                raise
            self._say("lock", "nodes on this machine may read frozen weights twice: %s", problem)
            return None
        return lock

    def _path(self, name: str) -> Path:
        return self._folder / f"{blake3(name.encode()).hexdigest(16)}.safetensors"

    def _say(self, kind: str, sentence: str, *values: object) -> None:
        """Logs the first trouble of each kind: a model has hundreds of parameters."""
        with self._turn:
            if kind in self._said:
                return
            self._said.add(kind)
        log.warning(sentence, *values)


def digest_of(parts: Parts) -> bytes:
    """The BLAKE3 of a packed parameter: of its parts' names, dtypes, shapes and bytes."""
    found = blake3(max_threads=blake3.AUTO)
    for name in sorted(parts):
        part = parts[name]
        found.update(f"{name} {part.dtype} {tuple(part.shape)} ".encode())
        found.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.digest()


def _is_ours(folder: Path) -> bool:
    """Whether only a FrozenCache can have made it."""
    return _FOLDER.fullmatch(folder.name) is not None and folder.is_dir() and not folder.is_symlink()


def _is_used(folder: Path) -> bool:
    """Whether a process uses it, or may use it."""
    try:
        lock = try_lock(folder / _USED)
    except ValueError:
        return True
    if lock is not None:
        os.close(lock)
    return lock is None


def _last_use(folder: Path) -> float:
    with suppress(OSError):
        return folder.stat().st_mtime
    return 0.0
