"""Sources of text, read as documents in pieces of bounded size, in the same order on every node."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TextIO

from dtfm.installed import install_line
from dtfm.node.data.allowed import EVERYTHING, check_match, glob_of
from dtfm.node.data.messages import MESSAGES, SHAREGPT, Conversation, conversation_of
from dtfm.node.data.problems import in_one_line
from dtfm.node.data.reaching import hub_cache, hub_token, needs_leave

# Characters per piece. A tokenizer gets a whole piece.
PIECE = 1 << 16
# Longest JSON line, in characters.
LONGEST_LINE = 1 << 26
# JSON lines after which it is told how far the reading is.
LINES_BETWEEN = 256
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})

Document = Iterable[str]
Reading = Callable[[int, int], None]
"""Called now and then with the number of bytes read, and of all bytes."""


def conversations(
    source: str, allowed: Sequence[str] = EVERYTHING, reading: Reading = lambda done, of: None
) -> Iterator[Conversation]:
    """The conversations of a glob of .jsonl files, or of a data set on the hub. ``allowed``, ``reading``: see `documents`.

    Raises:
        ValueError: as `documents`, or a record is no conversation.
    """
    found: Iterator[tuple[Any, str]]
    if source.startswith("hf:"):
        found = ((_as_written(record), where) for record, where in _hub(source.removeprefix("hf:")))
    elif wrong := next((f for f in _matching(source, allowed) if f.suffix != ".jsonl"), None):
        raise ValueError(
            f"data.source: {wrong} cannot hold conversations; give .jsonl files, or leave out data.text_field"
        )
    else:
        files = _matching(source, allowed)
        found = chain.from_iterable(map(_json_lines, files, _told_of_each(files, reading)))
    return (conversation_of(record, where) for record, where in found)


def documents(
    source: str,
    text_field: str,
    allowed: Sequence[str] = EVERYTHING,
    reading: Reading = lambda done, of: None,
) -> Iterator[Document]:
    """The documents of "python-stdlib", of a glob of .txt and .jsonl files, or of "hf:NAME" or "hf:NAME:CONFIG".

    ``text_field`` is the field that holds the text, for JSON lines and hub data sets. ``allowed``: the files that may be read
    (see read_allowed). They are checked here too, because other files may match now than when the run was checked. ``reading``
    is told the progress, if it can be known: for files.

    Raises:
        ValueError: immediately or while reading: no such files, a file that is not allowed, not text, no such field, and so on.
    """
    if source == "python-stdlib":
        return standard_library()
    if source.startswith("hf:"):
        return _texts(_hub(source.removeprefix("hf:")), text_field)
    files = _matching(source, allowed)
    return chain.from_iterable(
        _text_file(file, told) if file.suffix == ".txt" else _texts(_json_lines(file, told), text_field)
        for file, told in zip(files, _told_of_each(files, reading), strict=True)
    )


def state_of(source: str, allowed: Sequence[str] = EVERYTHING) -> str:
    """A text that changes when the documents change: the files, their sizes and the times of their last change. Empty if
    nothing on this machine tells, as for a data set on the hub."""
    if source == "python-stdlib":
        files = [file for _, file in _library_files()]
    elif source.startswith("hf:"):
        return ""
    else:
        files = _matching(source, allowed)
    states = ((file.absolute(), file.stat()) for file in files)
    return "\n".join(f"{file} {state.st_size} {state.st_mtime_ns}" for file, state in states)


def standard_library() -> Iterator[Document]:
    """The running Python's library modules: its .py files in order of their paths, without tests and files that were installed or
    generated on this machine."""
    for _, file in _library_files():
        with file.open(encoding="utf-8", errors="replace", newline="") as text:
            yield _pieces(text)


def _library_files() -> list[tuple[str, Path]]:
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


def _matching(pattern: str, allowed: Sequence[str]) -> list[Path]:
    names = sorted(glob.glob(glob_of(Path(pattern).expanduser()), recursive=True))
    for name in names:
        check_match("data.source", name, allowed)
    files = [path for path in map(Path, names) if path.is_file()]
    if not files:
        raise ValueError(
            f"data.source: no file matches {pattern!r} (in {Path.cwd()}); give a glob of .txt or .jsonl files"
        )
    for file in files:
        if file.suffix not in (".txt", ".jsonl"):
            raise ValueError(f"data.source: {file} is neither .txt nor .jsonl; narrow the pattern {pattern!r}")
    return files


def _told_of_each(files: Sequence[Path], reading: Reading) -> list[Callable[[TextIO], None]]:
    """For each file, a function to call now and then with the open file."""
    sizes = [file.stat().st_size for file in files]

    def tell(text: TextIO, before: int) -> None:
        reading(before + text.buffer.tell(), sum(sizes))

    return [partial(tell, before=before) for before in accumulate([0, *sizes[:-1]])]


def _text_file(file: Path, told: Callable[[TextIO], None]) -> Iterator[Document]:
    with file.open(encoding="utf-8-sig", newline="") as text:
        yield _decoded(_pieces(text, told), file)


def _texts(records: Iterable[tuple[Any, str]], text_field: str) -> Iterator[Document]:
    return (_cut(_text_of(record, text_field, where)) for record, where in records)


def _json_lines(file: Path, told: Callable[[TextIO], None]) -> Iterator[tuple[Any, str]]:
    """The records, and each record's place."""
    with file.open(encoding="utf-8-sig") as text:
        for number, line in enumerate(_decoded(iter(lambda: text.readline(LONGEST_LINE), ""), file), start=1):
            where = f"data.source: {file}, line {number}"
            if number % LINES_BETWEEN == 0:
                told(text)
            if len(line) == LONGEST_LINE:
                raise ValueError(f"{where} is longer than {LONGEST_LINE} characters; split it")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as problem:
                raise ValueError(f"{where} is not JSON ({problem}); .jsonl files have one object per line") from None
            yield record, where


def _hub(name: str) -> Iterator[tuple[Any, str]]:
    """The records, and each record's place."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"data.source: 'hf:{name}' needs the package datasets; install it with: {install_line('hub')}"
        ) from None
    # "NAME:CONFIG", unless it is a local path with a colon.
    path, _, config = (name, "", "") if Path(name).expanduser().exists() else name.partition(":")
    if Path(path).expanduser().exists():
        path = str(Path(path).expanduser().resolve())
    datasets.disable_progress_bars()
    here = Path(path).is_absolute()
    token, cache = hub_token(path), None if here else hub_cache(path)
    try:
        builder: Any = datasets.load_dataset_builder(path, config or None, token=token, cache_dir=cache)
        # Its author can name any files of this machine, and URLs that this machine's token opens.
        own = f"{path}/" if here else f"hf://datasets/{path}@"
        for file in chain.from_iterable((builder.config.data_files or {}).values()):
            if not file.startswith(own) or "/../" in file or "::" in file:
                raise ValueError(f"it names {file}, which is not part of it")
        for number, record in enumerate(builder.as_streaming_dataset("train"), start=1):
            yield record, f"data.source: hf:{name}, record {number}"
    except Exception as problem:
        why = f"{in_one_line(problem)}){'' if here else needs_leave(path)}"
        raise ValueError(
            f"data.source: 'hf:{name}' cannot be loaded ({why}; give the name of a data set with a split "
            '"train" on the Hugging Face hub, or hf:/path/to/a/folder'
        ) from problem


def _as_written(value: Any) -> Any:
    """A record without None at any depth: the package datasets gives each object all keys that the others have."""
    if isinstance(value, dict):
        return {key: _as_written(each) for key, each in value.items() if each is not None}
    return [_as_written(each) for each in value] if isinstance(value, list) else value


def _text_of(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {type(record).__name__}, not an object")
    if text_field not in record:
        raise ValueError(f"{where} has no field {text_field!r}, only {sorted(record)[:10]}; set data.text_field")
    if not isinstance(record[text_field], str):
        kind = type(record[text_field]).__name__
        fix = f"{MESSAGES!r} for conversations" if text_field == SHAREGPT else "one that does"
        raise ValueError(f"{where}: field {text_field!r} holds {kind}, not text; set data.text_field to {fix}")
    return record[text_field]  # type: ignore[no-any-return]


def _pieces(text: TextIO, told: Callable[[TextIO], None] = lambda text: None) -> Iterator[str]:
    """Pieces that end at a line end if one is near, so that tokens are not cut."""
    while piece := text.read(PIECE):
        told(text)
        yield piece + text.readline(PIECE)


def _cut(text: str) -> Iterator[str]:
    while len(text) > PIECE:
        end = text.find("\n", PIECE, 2 * PIECE) + 1 or PIECE
        yield text[:end]
        text = text[end:]
    yield text


def _decoded(pieces: Iterable[str], file: Path) -> Iterator[str]:
    try:
        yield from pieces
    except UnicodeDecodeError as problem:
        byte = problem.object[problem.start]
        raise ValueError(
            f"data.source: {file} is not UTF-8 text (a byte 0x{byte:02x}: {problem.reason}); convert it, or leave it out"
        ) from None
