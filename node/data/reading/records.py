"""The content of a file as a source has it: the pieces of a text, or records."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from dtfm.node.data.reading.files import File, library

PIECE = 1 << 16
"""Characters per piece. A tokenizer gets a whole piece."""
LONGEST_LINE = 1 << 26
"""Longest JSON line, and longest field of a table, in characters."""
RECORDS_BETWEEN = 256
"""Records after which it is told how far the reading is, and rows of a table that are in memory at a time."""

Told = Callable[[int], None]
"""Called now and then with the number of bytes of the file that are read."""


def pieces_of(file: File, told: Told) -> Iterator[str]:
    """The text of a .txt file, in pieces that end at a line end if one is near, so that tokens are not cut."""

    def pieces() -> Iterator[str]:
        with file.opened_text(newline="") as (text, tell):
            while piece := text.read(PIECE):
                told(tell())
                yield piece + text.readline(PIECE)

    return file.reading(pieces())


def records_of(file: File, told: Told, fields: Sequence[str] = ()) -> Iterator[tuple[Any, str]]:
    """The records of any other file, and each one's place. ``fields``: the fields that are needed; empty: all."""
    match file.kind:
        case ".csv":
            found = _table_rows(file, told)
        case ".parquet":
            found = _parquet_rows(file, told, fields)
        case _:
            found = _json_lines(file, told)
    return file.reading(found)


def _json_lines(file: File, told: Told) -> Iterator[tuple[Any, str]]:
    with file.opened_text() as (text, tell):
        for number, line in enumerate(_lines(text), start=1):
            where = f"{file.key}: {file.shown}, line {number}"
            if number % RECORDS_BETWEEN == 0:
                told(tell())
            if len(line) == LONGEST_LINE:
                raise ValueError(f"{where} is longer than {LONGEST_LINE} characters; split it")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as problem:
                raise ValueError(f"{where} is not JSON ({problem}); .jsonl files have one object per line") from None
            yield record, where


def _lines(text: TextIO) -> Iterator[str]:
    return iter(lambda: text.readline(LONGEST_LINE), "")


def _table_rows(file: File, told: Told) -> Iterator[tuple[Any, str]]:
    csv.field_size_limit(LONGEST_LINE)
    with file.opened_text(newline="") as (text, tell):
        rows = csv.DictReader(text)
        try:
            for number, row in enumerate(rows, start=1):
                if number % RECORDS_BETWEEN == 0:
                    told(tell())
                yield row, f"{file.key}: {file.name}, line {rows.line_num}"
        except csv.Error as problem:
            raise ValueError(
                f"{file.key}: {file.name}, line {rows.line_num} is no row of a table ({problem}); mend it, or leave it out"
            ) from None


def _parquet_rows(file: File, told: Told, fields: Sequence[str]) -> Iterator[tuple[Any, str]]:
    if file.compression:
        raise ValueError(
            f"{file.key}: {file.name}: .parquet files are compressed inside; unpack the {file.compression}"
        )
    parquet = library("pyarrow.parquet", file)
    with file.opened() as (content, tell):
        try:
            table = parquet.ParquetFile(content)
            wanted = [*fields] if fields and {*fields} <= {*table.schema_arrow.names} else None
            number = 0
            for batch in table.iter_batches(batch_size=RECORDS_BETWEEN, columns=wanted):
                told(tell())
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{file.key}: {file.name}, row {number}"
        except library("pyarrow", file).ArrowException as problem:
            raise ValueError(
                f"{file.key}: {file.name} cannot be read ({problem}): it is cut short, or no .parquet file; copy it again"
            ) from problem
