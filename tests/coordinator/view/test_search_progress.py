"""The progress of a search."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from dtfm.coordinator.view.search_progress import SearchProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(*, terminal: bool, seconds: int) -> str:
    """What a search that lasts so long has written, when it is looked at once a second."""
    output, clock = StringIO(), Clock()
    console = Console(file=output, force_terminal=terminal, width=80, legacy_windows=False)
    with SearchProgress(console, clock) as progress:
        for second in range(seconds):
            clock.now = float(second)
            progress.improved(1000 * second, 100.0 - second)
            progress.show()
    return output.getvalue()


def test_a_line_says_how_good_the_best_plan_is() -> None:
    progress = SearchProgress(Console(file=StringIO()), Clock())
    assert progress.line(3.2) == "Planning 3 s: no plan yet"
    progress.improved(52_000, 12.3)
    assert progress.line(40.6) == "Planning 41 s: 12.3 s a step; 52,000 plans tried"


def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    lines = shown(terminal=False, seconds=40).splitlines()
    assert [line.split(" s:")[0] for line in lines] == [f"Planning {at}" for at in (2, 7, 12, 18, 27)]


def test_on_a_terminal_one_line_is_rewritten_and_then_goes_away() -> None:
    written = shown(terminal=True, seconds=40)
    assert "Planning 39 s: 61.0 s a step; 39,000 plans tried" in written
    assert written.count("\n") <= 1
    assert written.endswith("\x1b[2K")


def test_what_is_over_at_once_shows_nothing() -> None:
    assert shown(terminal=False, seconds=2) == shown(terminal=True, seconds=2) == ""
