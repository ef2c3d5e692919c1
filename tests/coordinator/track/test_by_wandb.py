"""Weights & Biases offline: what its library has written, read by its own protocol."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import wandb

from dtfm.coordinator.track import by_wandb, tracking as service
from dtfm.coordinator.track.tracker import TrackedRun, TrackerError, tracked
from dtfm.coordinator.track.tracking import tracking
from dtfm.coordinator.track.wandb_file import last_point, records_in
from dtfm.coordinator.view.curves import Reading
from dtfm.protos.run_file.trackers import Destination
from tests.coordinator.serving import run_in, serving
from tests.coordinator.track.curves import Curves, curves_of

DEMO = "demo"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where the library keeps runs. The library reads the environment when it is set up."""
    monkeypatch.setattr(service, "SHORTEST_PAUSE", 0.0)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()
    yield tmp_path / "wandb"
    wandb.teardown()


def points_in(folder: Path) -> tuple[list[int], Curves]:
    """The points' numbers, and the curves, of everything in the folder."""
    numbers, curves = [], Curves()
    for file in sorted(folder.glob("offline-run-*/*.wandb"), key=last_point):
        for record in (each for each in records_in(file) if each.HasField("history")):
            point = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            numbers.append(record.history.step.num)
            for name in point.keys() - {"step"}:
                if not name.startswith("_"):
                    curves.setdefault(name, []).append((point["step"], point[name]))
    return numbers, curves


async def test_points_are_those_of_the_page_each_once_and_tell_of_no_place(offline: Path, tmp_path: Path) -> None:
    run = run_in(tmp_path, train={"steps": 8, "evaluate_every": 4})
    async with serving(tmp_path, run) as served:

        def kept() -> AbstractAsyncContextManager[None]:
            ours = tracked(served.server.ledger)
            return tracking([Destination("wandb", "p")], ours, served.store, served.server.log.on_event)

        async with served.node("a-node"), served.node("b-node"):
            async with kept():
                await served.until(lambda: served.ledger.training.step >= 3)
            await served.until(lambda: served.ledger.outcome is not None)
        async with kept():
            pass
        page = curves_of(served.store.read())
    check(offline, page, (str(tmp_path), "127.0.0.1", "a-node", os.getcwd()))


def check(kept: Path, page: Curves, hidden: tuple[str, ...]) -> None:
    numbers, curves = points_in(kept)
    assert len([*kept.glob("offline-run-*")]) == 2, "two processes, as it were"
    assert numbers == sorted(set(numbers))
    assert curves == page
    files = [*kept.rglob("*.wandb")]
    written = b"".join(file.read_bytes() for file in files)
    assert [text for text in hidden if text.encode() in written] == []
    assert b"global_batch" in written, "settings of the run file"
    (run, _) = [record.run for file in files for record in records_in(file) if record.HasField("run")]
    assert (run.host, run.display_name) == ("", f"{DEMO}-{run.run_id[:8]}")


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "wandb has no key; set WANDB_API_KEY to the one at"),
        ({"WANDB_API_KEY": "too short"}, "wandb has no key that it can use ("),
        ({"WANDB_MODE": "disabled"}, "wandb keeps nothing, as WANDB_MODE is disabled; set it to online or offline"),
    ],
)
def test_without_a_key_it_works_only_offline(
    environment: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_wandb.check("p")
    monkeypatch.delenv("WANDB_MODE")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()
    with pytest.raises(TrackerError) as refused:
        by_wandb.check("p")
    assert problem in str(refused.value)
    assert str(refused.value).count("\n") == 0
    assert "too short" not in str(refused.value)


def test_what_the_coordinator_prints_is_not_kept(offline: Path) -> None:
    writer = by_wandb.Writer("p", TrackedRun("x", "abcdef0123456789", {}))
    for number in range(1, 5):
        print(f"dtfm1.an-invitation {number}")
        print(f"dtfm1.an-invitation {number}", file=sys.stderr)
        writer.write(number, replace(Reading(number, 0.0), loss=1.0))
    writer.close()
    wandb.teardown()
    files = [each for each in offline.rglob("*") if each.is_file()]
    assert len(files) > 1
    assert [each for each in files if b"dtfm1.an-invitation" in each.read_bytes()] == []


def test_a_file_that_was_cut_off_is_read_up_to_there(offline: Path) -> None:
    writer = by_wandb.Writer("p", TrackedRun("x", "abcdef0123456789", {"long": "x" * 70_000}))
    for number in range(1, 400):
        writer.write(number, replace(Reading(number, 0.0), loss=1.0))
    writer.close()
    (file,) = offline.glob("offline-run-*/*.wandb")
    assert last_point(file) == 399
    size = file.stat().st_size
    for cut in (size // 2, 100_000, 50, 3):
        os.truncate(file, cut)
        assert last_point(file) < 399
    assert last_point(file) == 0
