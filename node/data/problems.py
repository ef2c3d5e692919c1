"""What other people's code says went wrong, as part of a message of ours."""

from __future__ import annotations


def in_one_line(problem: Exception) -> str:
    """At most 300 characters."""
    return " ".join(str(problem).split())[:300] or type(problem).__name__
