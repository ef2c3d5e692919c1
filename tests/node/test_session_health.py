"""What a node says of itself to whatever supervises its process."""

from __future__ import annotations

import pytest

from dtfm.node.session import health


@pytest.mark.parametrize(
    ("problem", "admitted", "good", "sentence"),
    [
        ("it was not let in yet", False, False, "without the coordinator at c:1: it was not let in yet"),
        ("", True, True, "in touch with the coordinator at c:1"),
        ("no answer", True, True, "without the coordinator at c:1: no answer; it tries again"),
    ],
)
def test_only_one_that_was_never_let_in_is_not_well(problem: str, admitted: bool, good: bool, sentence: str) -> None:
    """A coordinator that is started again finds its nodes alive."""
    assert health("c:1", problem, admitted=admitted) == (good, sentence)
