"""The live view in a terminal."""

from __future__ import annotations

from rich.console import Console

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.store import Record
from dtfm.coordinator.view.watch import View, render, sparkline
from dtfm.scheduler.model.plan import Plan, Stage
from tests.coordinator.script import aborted_after_twenty_steps


def test_the_view_fits_a_terminal_of_100_by_30() -> None:
    view = View()
    for record in aborted_after_twenty_steps().records:
        view.add(record)
    console = Console(width=100, height=30)
    with console.capture() as shown:
        console.print(render(view))
    lines = shown.get().splitlines()
    assert len(lines) <= 30
    assert max(len(line) for line in lines) <= 100
    text = "\n".join(lines)
    for expected in (
        "step 20/30",
        "loss 0.5000",
        "128 tokens/s",
        "held out 2.0000",
        "a, b",
        "c, d",
        "heaviest routes",
        "b -> d 4 micro-batches",
        "step 21 was aborted",
    ):
        assert expected in text, expected


def test_the_view_can_be_shown_before_anything_has_happened() -> None:
    console = Console(width=100, height=30)
    with console.capture() as shown:
        console.print(render(View()))
    assert "no run yet" in shown.get()


def test_a_sparkline_goes_from_the_smallest_to_the_largest() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_the_view_says_what_a_step_is_expected_to_take_and_what_no_plan_can_beat() -> None:
    stages = (Stage((0, 2), ("a",), (8,)),)

    def title(*adopted: tuple[float | None, float | None]) -> str:
        view, console = View(), Console(width=100, height=30)
        for number, (predicted, bound) in enumerate(adopted, start=1):
            plan = Plan(number, stages, ())
            view.add(Record(number, 0.0, ev.PlanAdopted(number, plan, "why", 0, predicted, bound)))
        with console.capture() as shown:
            console.print(render(view))
        return next(line for line in shown.get().splitlines() if "Stages" in line)

    assert "Stages: 12.3 s a step, at best 8.12 s" in title((12.3, 8.12))
    assert "Stages: 12.3 s a step, at best 8.12 s" in title((12.3, 8.12), (None, None))  # the same plan again
    assert "Stages: 12.3 s a step  " in title((12.3, None))
    assert "Stages x replicas" in title((None, None))  # logs of before
