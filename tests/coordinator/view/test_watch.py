"""The live view in a terminal."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.so_far import SoFar
from dtfm.coordinator.view.watch import render, sparkline
from dtfm.scheduler.model.plan import Plan, Stage
from tests.coordinator.script import LONG, aborted_after_twenty_steps, training
from tests.coordinator.web.stored_run import idle_run, slow_run


def screen(view: SoFar, width: int = 80, height: int = 24, now: float | None = None) -> list[str]:
    """The lines that a terminal of this size shows."""
    console = Console(width=width, height=height)
    with console.capture() as shown:
        console.print(render(view, console, now))
    return shown.get().splitlines()


def test_the_view_fits_a_terminal_of_80_by_24_and_nothing_is_cut() -> None:
    lines = screen(aborted_after_twenty_steps().view)
    assert len(lines) < 24, "the cursor is below"
    assert max(len(line) for line in lines) <= 80
    text = "\n".join(lines)
    for expected in (
        "step 20 of 30  loss 0.5000  128 tokens/s",
        "held out 2.0000",
        "a is idle: it is left out until it has been tested",
        "stage 0: layers 0-1  b",
        "stage 1: layers 2-3  c, d",
        "heaviest routes      b -> d 4 micro-batches",
        "scripted: the same stages without a",
    ):
        assert expected in text, expected
    assert "…" not in text


def test_names_and_sentences_that_are_long_are_wrapped_and_the_newest_events_stay() -> None:
    names = [f"a-rented-machine-far-away-with-a-name-as-long-as-they-come-{number}-cuda0"[:64] for number in range(4)]
    world = training(*names, **LONG)
    for node in names[:2]:
        world.lose(node, "its connection broke, " * 8)
    lines = screen(world.view)
    assert max(len(line) for line in lines) <= 80
    assert "…" not in "".join(lines)
    assert world.records[-1].event.narrate().split()[-1] in lines[-1]


def test_the_view_says_how_long_the_run_has_gone_on_and_will() -> None:
    world = training("a", "b", train={"steps": 3002})
    for _ in range(2):
        world.now += 2.0
        world.step()
    view = SoFar()
    for record in world.whole_log:
        view.add(Record(1, 1000.0 + 3600.0 * isinstance(record, ev.StepCommitted), record))
    seconds = view.steps[-1].seconds

    def day(at: float) -> str:
        return time.strftime("%a %d %b, %H:%M", time.localtime(at))

    def times(now: float) -> str:
        return next(line for line in screen(view, now=now) if "elapsed" in line)

    left = timedelta(seconds=round(3000 * seconds))
    assert times(4600.0) == f"plan 1  1:00:00 elapsed, {left} left, ends {day(4600.0 + 3000 * seconds)}"
    assert (
        times(4660.0)
        == f"plan 1  1:01:00 elapsed, {left - timedelta(seconds=60)} left, ends {day(4600.0 + 3000 * seconds)}"
    )
    view.add(Record(1, 4700.0, ev.RunFinished(3002, "all 3002 steps are done")))
    view.add(Record(2, 9000.0, ev.CoordinatorStopped("Ctrl-C")))
    assert times(9999.0) == "plan 1  1:01:40 elapsed"


def test_the_view_can_be_shown_before_anything_has_happened() -> None:
    assert "no run yet" in screen(SoFar())[0]


def test_a_sparkline_goes_from_the_smallest_to_the_largest() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_the_view_says_what_a_step_is_expected_to_take_and_what_no_plan_can_beat() -> None:
    stages = (Stage((0, 2), ("a",), (8,)),)

    def title(*adopted: tuple[float | None, float | None]) -> str:
        view = SoFar()
        for number, (predicted, bound) in enumerate(adopted, start=1):
            plan = Plan(number, stages, ())
            view.add(Record(number, 0.0, ev.PlanAdopted(number, plan, "why", 0, predicted, bound)))
        return " ".join(next(line for line in screen(view) if "stages" in line).split())

    assert title((12.3, 8.12)) == "stages 12.3 s a step, at best 8.12 s"
    assert title((12.3, 8.12), (None, None)) == "stages 12.3 s a step, at best 8.12 s"  # the same plan again
    assert title((12.3, None)) == "stages 12.3 s a step"
    assert title((None, None)) == "stages replicas"


def test_the_view_compares_what_the_plan_in_force_was_expected_to_take_with_what_its_steps_take() -> None:
    view, stages = SoFar(), (Stage((0, 2), ("a",), (8,)),)

    def adopt(number: int, predicted: float | None) -> None:
        view.add(Record(number, 0.0, ev.PlanAdopted(number, Plan(number, stages, ()), "why", 0, predicted, 8.0)))

    def commit(step: int, seconds: float, generation: int, resumed: bool = False) -> None:
        event = ev.StepCommitted(step, generation, 1.0, 100, 1.0, seconds, 8, {}, {}, resumed)
        view.add(Record(10 + step, 0.0, event))

    adopt(1, 10.0)
    commit(1, 99.0, 1)
    adopt(2, 12.0)
    assert (view.ledger.training.predicted, view.measured) == (12.0, None)  # none of its steps is done
    for step, seconds in enumerate((60.0, 16.0, 15.0, 14.0), start=2):
        commit(step, seconds, 2)
    commit(6, 1.0, 2, resumed=True)
    assert view.measured == 15.5
    assert "it takes 15.5 s (predicted/measured 0.77)" in "\n".join(screen(view, 120))
    adopt(3, None)  # carried on, without a new plan
    commit(7, 24.0, 3)
    assert (view.ledger.training.predicted, view.measured) == (12.0, 24.0)


def test_the_first_line_is_the_verdict_and_what_it_costs_is_told() -> None:
    view = SoFar()
    for record in slow_run():
        view.add(record)
    lines = screen(view, 100, now=view.last + 1)
    since = time.strftime("%H:%M", time.localtime(view.slow["runpod-2"].since))
    assert lines[0] == f"● slow: runpod-2 takes 2.9 times the planned time, since {since}"
    so_far, whole = view.cost_until(view.last + 1), view.whole_cost(view.last + 1)
    cost = f"{so_far:.2f} EUR so far, 1.90 EUR an hour, about {whole:.2f} EUR in all"
    assert f"{cost} (1 without a price)" in "\n".join(lines)


def test_an_idle_node_is_told_with_a_remedy() -> None:
    view = SoFar()
    for record in idle_run():
        view.add(record)
    text = " ".join(" ".join(screen(view, 100, 40)).split())
    assert "attic is idle: its fastest link to the plan's nodes carries 112 Mbit/s" in text
    assert "It would help: a line of 168 Mbit/s" in text
