"""Sources of text, read as documents in pieces of bounded size, in the same order on every node."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, TextIO

from dtfm.node.data.allowed import EVERYTHING
from dtfm.node.data.reading.files import TEXT, File, files_of
from dtfm.node.data.reading.hub_records import hub_records
from dtfm.node.data.reading.messages import SHAREGPT, Conversation, conversation_of
from dtfm.node.data.reading.records import PIECE, pieces_of, records_of
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.records import HUB, MESSAGES, STANDARD_LIBRARY

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})
_FIELD = re.compile(r"\{([^{}]+)\}")

Document = Iterable[str]
Reading = Callable[[int, int], None]
"""Called now and then with the number of bytes read, and of all bytes."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source, as the run file describes it."""

    place: str
    """STANDARD_LIBRARY, a path, a pattern, a URL, or HUB and a data set's name."""
    text_field: str = "text"
    """The field of a record that holds the text. MESSAGES: the records are conversations."""
    split: str = "train"
    """Of a data set on the hub."""
    limit: int = 0
    """The most documents that are read. 0: all."""
    template: str = ""
    """A text with fields' names in braces. It makes the text of a record, in place of text_field. Empty: there is none."""
    key: str = "data.source"
    """The run file's key that names the place, for errors."""
    weight: float = 1.0
    """The part of all samples that come from it is this, divided by the sum of all sources' weights."""

    @property
    def talks(self) -> bool:
        """Whether its records are conversations."""
        return self.text_field == MESSAGES and not self.template

    @property
    def reading(self) -> str:
        """All that its text depends on, except the files' content."""
        return "\n".join((self.place, self.text_field, self.split, str(self.limit), self.template))

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that make the text of a record."""
        return tuple(_FIELD.findall(self.template)) if self.template else (self.text_field,)


def sources_of(data: Run.Data) -> list[Source]:
    """The sources that a run trains on."""
    if not data.sources:
        return [Source(data.source, data.text_field, data.split or "train", data.limit, data.template)]
    return [
        Source(
            each.source,
            each.text_field,
            each.split,
            each.limit,
            each.template,
            f"data.sources[{number}].source",
            each.weight,
        )
        for number, each in enumerate(data.sources)
    ]


def named(data: Run.Data) -> str:
    """The places of its sources, for people."""
    return ", ".join(source.place for source in sources_of(data))


def held_out_of(data: Run.Data) -> Source | None:
    """The source of held-out samples alone, if the run names one."""
    if not data.held_out and not data.held_out_split:
        return None
    of, key = sources_of(data)[0], "data.held_out" if data.held_out else "data.held_out_split"
    return replace(of, place=data.held_out or of.place, split=data.held_out_split or of.split, limit=0, key=key)


def conversations(
    source: Source, allowed: Sequence[str] = EVERYTHING, reading: Reading = lambda done, of: None
) -> Iterator[Conversation]:
    """The conversations of .jsonl and .parquet files, or of a data set on the hub. ``allowed``, ``reading``: see `documents`.

    Raises:
        ValueError: as `documents`, or a record is no conversation.
    """
    if source.place.startswith(HUB):
        found = hub_records(source.place, source.split, source.key)
        return (conversation_of(_as_written(record), where) for record, where in _limited(found, source))
    return conversations_of(files_of(source.place, source.key, allowed), source, reading)


def conversations_of(files: Sequence[File], source: Source, reading: Reading) -> Iterator[Conversation]:
    """The conversations of these files of the source. Raises ValueError, as `conversations`."""
    if wrong := next((file for file in files if file.kind in (TEXT, ".csv")), None):
        raise ValueError(
            f"{source.key}: {wrong.name} cannot hold conversations; give .jsonl or .parquet files, or leave out data.text_field"
        )
    found = chain.from_iterable(map(records_of, files, _told_of_each(files, reading)))
    return (conversation_of(_as_written(record), where) for record, where in _limited(found, source))


def documents(
    source: Source, allowed: Sequence[str] = EVERYTHING, reading: Reading = lambda done, of: None
) -> Iterator[Document]:
    """The documents of a source.

    ``allowed``: the files that may be read (see read_allowed). They are checked here too, because other files may match now than
    when the run was checked. ``reading`` is told the progress, if it can be known: for files.

    Raises:
        ValueError: immediately or while reading: no such files, a file that is not allowed, not text, no such field, and so on.
    """
    if source.place == STANDARD_LIBRARY:
        return _limited(standard_library(), source)
    if source.place.startswith(HUB):
        return _limited(_texts(hub_records(source.place, source.split, source.key), source), source)
    return documents_of(files_of(source.place, source.key, allowed), source, reading)


def documents_of(files: Sequence[File], source: Source, reading: Reading) -> Iterator[Document]:
    """The documents of these files of the source. Raises ValueError, as `documents`."""
    found = (_documents_of(file, told, source) for file, told in zip(files, _told_of_each(files, reading), strict=True))
    return _limited(chain.from_iterable(found), source)


def state_of(source: Source, allowed: Sequence[str] = EVERYTHING) -> str:
    """A text that changes when the documents change: the files, their sizes and the times of their last change. Empty if
    nothing tells, as for a data set on the hub."""
    if source.place.startswith(HUB):
        return ""
    if source.place == STANDARD_LIBRARY:
        stats = ((file.absolute(), file.stat()) for _, file in library_files())
        return "\n".join(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)
    states = [file.state for file in files_of(source.place, source.key, allowed)]
    return "\n".join(states) if all(states) else ""


def standard_library() -> Iterator[Document]:
    """The running Python's library modules: its .py files in order of their paths, without tests and files that were installed or
    generated on this machine."""
    for _, file in library_files():
        with file.open(encoding="utf-8", errors="replace", newline="") as text:
            yield _pieces(text)


def library_files() -> list[tuple[str, Path]]:
    """The modules' paths below the library's folder, in order, and their files. Raises ValueError if there are none."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = list[tuple[str, Path]]()
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - _NOT_LIBRARY  # what was installed may be many times the library
        modules = [
            Path(folder, each) for each in names if each.endswith(".py") and not each.startswith("_sysconfigdata")
        ]
        files += [(file.relative_to(root).as_posix(), file) for file in modules if not file.is_symlink()]
    if not files:
        raise ValueError(f"data.source: this Python has no library sources in {root}; name text files instead")
    return sorted(files)


def _pieces(text: TextIO) -> Iterator[str]:
    while piece := text.read(PIECE):
        yield piece + text.readline(PIECE)


def _told_of_each(files: Sequence[File], reading: Reading) -> list[Callable[[int], None]]:
    """For each file, a function to call now and then with the number of its bytes that are read."""
    sizes = [file.size for file in files]

    def tell(done: int, before: int) -> None:
        reading(before + done, sum(sizes))

    return [partial(tell, before=before) for before in accumulate([0, *sizes[:-1]])]


def _limited(found: Iterator[Any], source: Source) -> Iterator[Any]:
    return islice(found, source.limit or None)


def _documents_of(file: File, told: Callable[[int], None], source: Source) -> Iterator[Document]:
    if file.kind == TEXT:
        return iter([pieces_of(file, told)])
    return _texts(records_of(file, told, source.fields), source)


def _texts(records: Iterable[tuple[Any, str]], source: Source) -> Iterator[Document]:
    return (_cut(_text_of(record, source, where)) for record, where in records)


def _as_written(value: Any) -> Any:
    """A record without None at any depth: tables give each object all keys that the others have."""
    if isinstance(value, dict):
        return {key: _as_written(each) for key, each in value.items() if each is not None}
    return [_as_written(each) for each in value] if isinstance(value, list) else value


def _text_of(record: Any, source: Source, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {type(record).__name__}, not an object")
    if source.template:
        return _FIELD.sub(lambda found: _value(record, found[1], where), source.template)
    field = source.text_field
    if field not in record:
        raise ValueError(f"{where} has no field {field!r}, only {sorted(record)[:10]}; set data.text_field")
    if not isinstance(record[field], str):
        kind = type(record[field]).__name__
        fix = f"{MESSAGES!r} for conversations" if field == SHAREGPT else "one that does"
        raise ValueError(f"{where}: field {field!r} holds {kind}, not text; set data.text_field to {fix}")
    return record[field]  # type: ignore[no-any-return]


def _value(record: dict[str, Any], field: str, where: str) -> str:
    """The field's text, for a template. A field without a value is empty."""
    if field not in record:
        raise ValueError(f"{where} has no field {field!r}, only {sorted(map(str, record))[:10]}; mend data.template")
    value = record[field]
    if isinstance(value, dict | list):
        raise ValueError(f"{where}: field {field!r} holds {type(value).__name__}, not text; mend data.template")
    return "" if value is None else str(value)


def _cut(text: str) -> Iterator[str]:
    while len(text) > PIECE:
        end = text.find("\n", PIECE, 2 * PIECE) + 1 or PIECE
        yield text[:end]
        text = text[end:]
    yield text
