"""Text of others on a terminal or in a log: without escape sequences, and without lines that look like the program's own."""

from __future__ import annotations

import json
import logging


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Like "1 step" and "1,200 steps". ``ending``: of the noun, for more than one."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def printable(text: str, instead: str = "�") -> str:
    """``text`` in one line, with ``instead`` of each character that cannot be printed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else instead for c in text)


def printable_lines(text: str) -> str:
    """The same, with the ``text``'s lines as they are."""
    return "\n".join(printable(line) for line in text.split("\n"))


def escaped(text: str) -> str:
    """``text`` in one line, with an escape sequence of Python for each character that cannot be printed, like "\\n"."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class PrintableFormatter(logging.Formatter):
    """Of records in which peers are quoted. Further lines, as of a traceback, are indented."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record)).replace("\n", "\n    ")


class JsonFormatter(PrintableFormatter):
    """Each record as a JSON object in a line. ``place`` of a record, a dictionary, adds its keys."""

    def format(self, record: logging.LogRecord) -> str:
        told = {"time": record.created, "level": record.levelname.lower(), **getattr(record, "place", {})}
        return json.dumps({**told, "message": super().format(record)})
