"""A refusal, and helpers that checks of all messages share."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dtfm.protos import control_pb2 as wire
from dtfm.protos.printable import printable

SENTENCE_CHARACTERS = 500
MOST_SUMMED = 1e300
"""The sum of losses or squared norms over all nodes cannot overflow if each is at most this."""


class Refused(ValueError):
    """A message is refused: ``reason`` is for programs, the sentence for people."""

    def __init__(self, reason: wire.RefusalReason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def malformed(field: str, value: object, wanted: str) -> Refused:
    return Refused(wire.MALFORMED, f"{field} is {shorten(repr(value), 80)}; it must be {wanted}")


def require(holds: bool, field: str, value: object, wanted: str) -> None:
    """Raises Refused unless the field's condition ``holds``. ``wanted``: the condition in words."""
    if not holds:
        raise malformed(field, value, wanted)


def shorten(text: str, characters: int = SENTENCE_CHARACTERS) -> str:
    """``text`` as one printable line of at most ``characters``."""
    line = printable(text, " ")
    return line if len(line) <= characters else line[: characters - 3] + "..."


def name_some(names: Iterable[str]) -> str:
    """The first eight of the names, in order, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def is_finite(*values: float) -> bool:
    """Whether sums of such values over all nodes of a plan cannot overflow: larger values count as infinite."""
    return all(abs(value) <= MOST_SUMMED for value in values)


def check_number(field: str, value: float, least: float, most: float) -> None:
    holds = math.isfinite(value) and least <= value <= most
    require(holds, field, value, f"a finite number from {least:g} to {most:g}")
