"""`plan`: the scheduler alone, as people and scripts run it."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from dtfm.coordinator.command.background import in_background, search_shown
from dtfm.coordinator.log.wording import MOST_GAP
from dtfm.scheduler.model.cluster import Line
from dtfm.scheduler.schedule import schedule
from tests.coordinator.command.typed import Typed
from tests.scheduler.clusters import even_workload, random_cluster
from tests.scheduler.dumps import dump_network, dump_workload


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "n.json").write_text(dump_network(random_cluster(5, 12)))
    (tmp_path / "w.json").write_text(dump_workload(even_workload()))
    return "plan", "--network", str(tmp_path / "n.json"), "--workload", str(tmp_path / "w.json"), "--deadline", "0.5"


def test_a_plan_comes_with_the_bound_and_the_gap(tmp_path: Path, files: tuple[str, ...], typed: Typed) -> None:
    (tmp_path / "n.json").write_text(dump_network(random_cluster(5, 3)))
    document = json.loads(typed(*files, "--json"))
    assert typed.err == "", "a search is shown in a terminal alone"
    seconds, bound = document["predicted"]["iteration_seconds"], document["lower_bound_seconds"]
    assert 0 < bound <= seconds
    assert document["gap"] == pytest.approx(seconds / bound)
    last = typed(*files).splitlines()[-1]
    assert last.startswith("No plan can take less than ")
    assert last.endswith((" times as long.", "% longer.", " as good as any."))


def test_a_bound_that_says_nothing_is_not_shown(files: tuple[str, ...], typed: Typed) -> None:
    assert json.loads(typed(*files, "--json"))["gap"] > MOST_GAP
    assert "No plan can take less" not in typed(*files)


def test_a_network_that_names_no_lines_is_told_what_they_count_as(
    tmp_path: Path, files: tuple[str, ...], typed: Typed
) -> None:
    assert "n.json names no lines: each node's is taken to be as fast as its fastest link." in typed(*files)
    known = replace(random_cluster(5, 12), lines=(Line("m", 1e8, 1e8),))
    known = replace(known, nodes=(*known.nodes[:10], *(replace(node, line="m") for node in known.nodes[10:])))
    (tmp_path / "n.json").write_text(dump_network(known))
    assert "names no lines" not in typed(*files)


def test_a_terminal_shows_what_the_search_has_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with search_shown("Planning") as improved:
        improved(52_000, 12.3)
    shown = capsys.readouterr()
    assert "Planning: 12.3 s a step; 52,000 plans tried" in shown.err
    assert shown.err.endswith("\x1b[2K")
    assert shown.out == ""


def test_elsewhere_a_search_is_announced(files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setattr("dtfm.coordinator.command.background.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("dtfm.coordinator.command.background.LOOK_SECONDS", 0.1)
    typed(*files, "--json")
    assert typed.err.count("Planning ...") == 1


def test_compiling_is_announced(files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setattr("dtfm.coordinator.command.background.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("dtfm.coordinator.command.planning.print_plan.warm_up", lambda: time.sleep(0.1))
    typed(*files, "--json")
    assert typed.err.count("Compiling the scheduler, once ...") == 1


@pytest.mark.parametrize(("option", "threads"), [((), os.cpu_count()), (("--threads", "3"), 3)])
def test_all_cores_search_unless_told_otherwise(
    option: tuple[str, ...], threads: int, files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    asked = []

    def spy(*arguments: Any, **options: Any) -> Any:
        asked.append(options["threads"])
        return schedule(*arguments, **options)

    monkeypatch.setattr("dtfm.coordinator.command.planning.print_plan.schedule", spy)
    typed(*files, *option)
    assert set(asked) == {threads}


@pytest.mark.parametrize("deadline", [(), ("--deadline", "3600")])
def test_after_ctrl_c_the_best_plan_so_far_is_printed(
    deadline: tuple[str, ...], files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    """It comes with the search's first plan, which then goes on only when it has been told to stop."""
    interrupts = iter(range(1))

    def interrupted(*arguments: Any, **options: Any) -> Any:
        def improved(_plans: int, _seconds: float) -> None:
            if next(interrupts, None) is not None:
                os.kill(os.getpid(), signal.SIGINT)
                while not options["stopped"]():
                    time.sleep(0.001)

        return schedule(*arguments, **{**options, "improved": improved})

    monkeypatch.setattr("dtfm.coordinator.command.planning.print_plan.schedule", interrupted)
    document = json.loads(typed(*files[:-2], *deadline, "--json"))
    assert document["plan"]["stages"]
    assert document["elapsed_seconds"] < 60
    assert document["evaluations"] < 2_000  # without Ctrl-C it tries fifty times as many


def test_a_second_ctrl_c_ends_at_once() -> None:
    stop, never = Event(), Event()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait()
        os.kill(os.getpid(), signal.SIGINT)
        never.wait()

    with pytest.raises(KeyboardInterrupt):
        in_background(work, stop)
    assert stop.is_set()
    never.set()


def test_afterwards_ctrl_c_does_what_it_did_before() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append("before"))
    stop = Event()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait()

    try:
        in_background(work, stop)
        assert heard == []
        os.kill(os.getpid(), signal.SIGINT)
        assert heard == ["before"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_goes_wrong_in_the_background_is_raised() -> None:
    def fails() -> None:
        raise ValueError("so it is")

    with pytest.raises(ValueError, match="so it is"):
        in_background(fails)
