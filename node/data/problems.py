"""Problems, told to a user: several at the same time, or problems of other people's code."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def told_together(checks: Iterable[Callable[[], object]]) -> None:
    """Makes all checks. If some raise a ValueError, raises one ValueError with each message in a line of its own."""
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as problem:
            problems.append(str(problem))
    if problems:
        raise ValueError("\n".join(problems))


MOST_CHARACTERS = 1000


class Withheld(ValueError):
    """A problem whose ``details`` are for this machine's operator. Others, such as the coordinator, hear only ``told``."""

    def __init__(self, told: str, details: str) -> None:
        super().__init__(details)
        self.told = told


def sentence_of(error: Exception) -> str:
    """The error in a sentence for the coordinator, with its type unless our own wording makes the type clear."""
    return error.told[:MOST_CHARACTERS] if isinstance(error, Withheld) else in_full(error)


def in_full(error: Exception) -> str:
    """The same sentence for this machine's operator."""
    ours = isinstance(error, (ValueError, ConnectionError)) or type(error).__module__.startswith("dtfm.")
    return (str(error) if ours else f"{type(error).__name__}: {error}")[:MOST_CHARACTERS]


def in_one_line(problem: Exception) -> str:
    """The problem in at most 300 characters."""
    return " ".join(str(problem).split())[:300] or type(problem).__name__
