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


def in_one_line(problem: Exception) -> str:
    """At most 300 characters."""
    return " ".join(str(problem).split())[:300] or type(problem).__name__
