"""The files of a source: which there are, on the disk or at a URL, and how each is opened, compressed or not."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar, cast

from dtfm.installed import install_line
from dtfm.node.data.allowed import check_match
from dtfm.node.data.problems import Withheld, in_one_line
from dtfm.node.data.reaching import open_place, told, withheld
from dtfm.protos.places import is_remote_url, is_web
from dtfm.protos.source_files import names_on_disk

T = TypeVar("T")

TEXT = ".txt"
KINDS = (TEXT, ".jsonl", ".csv", ".parquet")
COMPRESSED = (".gz", ".zst")
WHICH = "give .txt, .jsonl, .csv or .parquet files, also as .gz or .zst"
_WILDCARD = re.compile(r"[*?\[]")
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "md5Hash")
"""What file systems call a value that changes when a file changes."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source. ``name``: its path or URL. ``size``: in bytes, as it lies there; 0: not known. ``state``: a text that
    changes when the file changes; empty: nothing tells. ``open_raw``: opens the file as it lies there."""

    name: str
    key: str
    size: int
    state: str
    open_raw: Callable[[], BinaryIO]
    start: int = 0
    """For a part of a file: its first byte."""

    @property
    def shown(self) -> str:
        """Its name, for people."""
        return f"{self.name} from byte {self.start:,}" if self.start else self.name

    def cut_at_lines(self, most_bytes: int) -> list[File]:
        """Parts of about ``most_bytes``, which end at line ends. Only .jsonl files that are not compressed are cut. Raises
        OSError."""
        number, borders = self.most_parts(most_bytes), [0]
        if number == 1:
            return [self]
        with self.open_raw() as raw:
            for part in range(1, number):
                raw.seek(self.size * part // number)
                raw.readline()
                if borders[-1] < raw.tell() < self.size:
                    borders.append(raw.tell())
        return [self._part(start, end) for start, end in pairwise([*borders, self.size])]

    def most_parts(self, most_bytes: int) -> int:
        """The most parts that `cut_at_lines` makes."""
        return max(1, -(-self.size // most_bytes)) if self.kind == ".jsonl" and not self.compression else 1

    def _part(self, start: int, end: int) -> File:
        state = f"{self.state} {start} {end}" if self.state else ""
        opened = partial(_opened_part, self.open_raw, start, end)
        return replace(self, start=start, size=end - start, state=state, open_raw=opened)

    @property
    def kind(self) -> str:
        """One of KINDS, or another suffix."""
        path = Path(self.name)
        return Path(path.stem).suffix if self.compression else path.suffix

    @property
    def compression(self) -> str:
        """One of COMPRESSED, or empty."""
        suffix = Path(self.name).suffix
        return suffix if suffix in COMPRESSED else ""

    @contextmanager
    def opened(self) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
        """The file's content, and a function that says how many bytes of the file are read."""
        with self.open_raw() as raw:
            yield self._decompressed(raw), raw.tell

    @contextmanager
    def opened_text(self, newline: str | None = None) -> Iterator[tuple[TextIO, Callable[[], int]]]:
        """The same as text in UTF-8. A mark at its beginning is no part of it. ``newline``: as in `open`."""
        with self.opened() as (content, tell):
            yield io.TextIOWrapper(content, encoding="utf-8-sig", newline=newline), tell

    def _decompressed(self, raw: BinaryIO) -> BinaryIO:
        if self.compression == ".gz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        if not self.compression:
            return raw
        pyarrow = library("pyarrow", self)
        return cast(BinaryIO, pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"))

    def reading(self, parts: Iterable[T]) -> Iterator[T]:
        """The parts, which are read from this file. Raises ValueError, which names the file, if they cannot be read, and the
        errors of the disk."""
        try:
            yield from parts
        except UnicodeDecodeError as problem:
            byte = problem.object[problem.start]
            raise ValueError(
                f"{self.key}: {self.name} is not UTF-8 text (a byte 0x{byte:02x}: {problem.reason}); convert it, or leave it out"
            ) from None
        except ValueError:
            raise
        except Exception as problem:  # whatever a file system raises
            why = in_one_line(problem)
            if is_web(self.name):
                raise Withheld(told(self.key, self.name), f"{self.key}: {self.name}: {why}") from problem
            if self.compression and isinstance(problem, EOFError | OSError | zlib.error):
                raise ValueError(
                    f"{self.key}: {self.name} cannot be read to its end ({why}): it is cut short, or no {self.compression} file; "
                    "copy it again"
                ) from problem
            raise


class _Part(io.RawIOBase):
    """The bytes of a file from its present place to before ``end``."""

    def __init__(self, whole: BinaryIO, end: int) -> None:
        self._whole, self._start, self._end = whole, whole.tell(), end

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._whole.tell() - self._start

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        content = self._whole.read(min(len(view), self._end - self._whole.tell()))
        view[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._whole.close()
        super().close()


def _opened_part(open_raw: Callable[[], BinaryIO], start: int, end: int) -> BinaryIO:
    whole = open_raw()
    whole.seek(start)
    return cast(BinaryIO, io.BufferedReader(_Part(whole, end)))


def library(name: str, file: File) -> Any:
    """The package that reads the file. Raises ValueError if it is not installed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"{file.key}: {file.name} needs the package pyarrow; install it with: {install_line('hub')}"
        ) from None


def files_of(place: str, key: str, allowed: Sequence[str]) -> list[File]:
    """The files that a path, a URL, or a pattern names, in order. ``allowed``: see read_allowed. Raises ValueError."""
    found = _at_url(place, key) if is_remote_url(place) else _on_disk(place, key, allowed)
    for file in found:
        if file.kind not in KINDS:
            raise ValueError(f"{key}: {file.name} is of no kind that is read here; {WHICH}, or narrow {place!r}")
    return found


def _on_disk(place: str, key: str, allowed: Sequence[str]) -> list[File]:
    names = names_on_disk(place)
    for name in names:
        check_match(key, name, allowed)
    found = [path for path in map(Path, names) if path.is_file()]
    if not found:
        if names:
            inside = (path.suffix for path in sorted(Path(names[0]).iterdir()) if path.suffix in (*KINDS, *COMPRESSED))
            like = Path(names[0], f"*{next(inside, '.jsonl')}")
            raise ValueError(f"{key}: {names[0]} is a folder; name the files in it, like '{like}'")
        raise ValueError(f"{key}: no file matches {place!r} (in {Path.cwd()}); {WHICH}")
    return [_local(path, key) for path in found]


def _local(path: Path, key: str) -> File:
    state = path.stat()
    said = f"{path.absolute()} {state.st_size} {state.st_mtime_ns}"
    return File(str(path), key, state.st_size, said, lambda: path.open("rb"))


def _at_url(url: str, key: str) -> list[File]:
    with withheld(key, url):
        try:
            fs, path = open_place(url, key)
            is_pattern = _WILDCARD.search(path) is not None and not is_web(url)
            names = sorted(fs.glob(path)) if is_pattern else [path]
            return [_remote(fs, name, key) for name in names if not is_pattern or not fs.isdir(name)] or _none(key, url)
        except (ValueError, Withheld):
            raise
        except FileNotFoundError:
            _none(key, url)
            raise
        except Exception as problem:  # whatever a file system raises
            if is_web(url):
                raise
            raise ValueError(f"{key}: {url} cannot be read ({in_one_line(problem)})") from problem


def _none(key: str, url: str) -> list[File]:
    raise ValueError(f"{key}: there is no file at {url}; {WHICH}")


def _remote(fs: Any, path: str, key: str) -> File:
    facts = fs.info(path)
    stamp = next((str(facts[name]) for name in _STAMPS if facts.get(name)), "")
    name, size = fs.unstrip_protocol(path), int(facts.get("size") or 0)
    return File(name, key, size, f"{name} {size} {stamp}" if stamp else "", partial(fs.open, path, "rb"))
