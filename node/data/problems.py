"""What went wrong, told to a user: several things at once, or what other people's code says."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def told_together(checks: Iterable[Callable[[], object]]) -> None:
    """Makes all checks. Raises ValueError if some raise one: with what each of these says, in a line of its own."""
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
    """A problem whose ``details`` are for this machine's operator; others, such as the coordinator, hear what is ``told``."""

    def __init__(self, told: str, details: str) -> None:
        super().__init__(details)
        self.told = told


def sentence_of(error: Exception) -> str:
    """The error in a sentence, as the coordinator is told of it, with its type unless our own wording makes that clear."""
    return error.told[:MOST_CHARACTERS] if isinstance(error, Withheld) else in_full(error)


def in_full(error: Exception) -> str:
    """The same, as this machine's operator is told of it."""
    ours = isinstance(error, (ValueError, ConnectionError)) or type(error).__module__.startswith("dtfm.")
    return (str(error) if ours else f"{type(error).__name__}: {error}")[:MOST_CHARACTERS]


def in_one_line(problem: Exception) -> str:
    """At most 300 characters."""
    return " ".join(str(problem).split())[:300] or type(problem).__name__
