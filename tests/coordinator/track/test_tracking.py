"""Curves that are written while a run goes on, by trackers that work, fail, hang and come back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dtfm.coordinator.command.client import records
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.store.store import Store
from dtfm.coordinator.track import tracking as service
from dtfm.coordinator.track.tracker import tracked
from dtfm.coordinator.track.tracking import tracking
from dtfm.coordinator.track.writing import write_curves
from dtfm.coordinator.view.curves import Reading
from dtfm.protos.run_file.errors import RunFileError
from dtfm.protos.run_file.run_file import parse_run
from dtfm.protos.run_file.trackers import Destination, read_destination
from tests.coordinator.script import run_table
from tests.coordinator.serving import Served, run_in, serving, train
from tests.coordinator.stores import store_url
from tests.coordinator.track.curves import curves_of, in_tensorboard
from tests.coordinator.web.stored_run import stored_run, write

FAKE = Destination("wandb", "fake")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SHORTEST_PAUSE", 0.0)
    monkeypatch.setattr(service, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(service, "LAST_RETRY", 0.01)


@asynccontextmanager
async def kept_of(served: Served, *to: Destination) -> AsyncIterator[None]:
    async with tracking(to, tracked(served.server.ledger), served.store, served.server.log.on_event):
        yield


class Fake:
    """A tracker that keeps what it is given, and does as the test says before."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.has = 0
        self.steps: list[int] = []
        self.flushed = threading.Event()
        self._before = before

    def write(self, sequence: int, figures: Reading) -> None:
        self._before()
        self.has = sequence
        self.steps += [figures.step] if figures.loss is not None else []

    def back_to(self, time: float, step: int) -> None:
        pass

    def flush(self) -> None:
        self.flushed.set()

    def close(self) -> None:
        pass


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], None]:
    """Makes the test's tracker the one that is opened."""

    def use(fake: Fake) -> None:
        monkeypatch.setattr(service, "open_tracker", lambda *_: fake)

    return use


async def test_tensorboard_gets_a_run_as_it_goes_on_and_what_it_has_missed(tmp_path: Path) -> None:
    place = Destination("tensorboard", str(tmp_path / "curves"))
    run = run_in(tmp_path, train={"steps": 12, "evaluate_every": 4})
    async with serving(tmp_path, run) as served:
        async with served.node("a"), served.node("b"):
            async with kept_of(served, place):
                await served.until(lambda: served.ledger.training.step >= 3)
            first = in_tensorboard(tmp_path / "curves")["loss"]
            await asyncio.wait([served.task], timeout=30)
        async with kept_of(served, place):
            pass
        page, shown = curves_of(served.store.read()), in_tensorboard(tmp_path / "curves")
    assert first == shown["loss"][: len(first)]
    assert len(first) >= 3
    assert {name: [step for step, _ in points] for name, points in shown.items()} == {
        name: [step for step, _ in points] for name, points in page.items()
    }
    assert [step for step, _ in shown["loss"]] == list(range(1, 13))
    assert [step for step, _ in shown["held_out_loss"]] == [4, 8, 12]


async def test_curves_are_read_from_a_running_coordinator_too(tmp_path: Path) -> None:
    place = Destination("tensorboard", str(tmp_path / "curves"))
    async with serving(tmp_path, run_in(tmp_path, train={"steps": 5}), stays=True) as served:
        async with served.node("a"), served.node("b"):
            await served.until(lambda: served.ledger.outcome is not None)
        (written,) = await write_curves([place], records(served.address, follow=False), as_they_come=False)
        page, shown = curves_of(served.store.read()), in_tensorboard(tmp_path / "curves")
    assert (written.steps, written.evaluations) == (5, len(page["held_out_loss"]))
    assert {name: len(points) for name, points in shown.items()} == {name: len(each) for name, each in page.items()}


async def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_its_end(
    tmp_path: Path, opened: Callable[[Fake], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "CLOSE_SECONDS", 0.1)
    hold = threading.Event()
    opened(Fake(lambda: bool(hold.wait(60))))
    async with serving(tmp_path) as served:
        async with kept_of(served, FAKE):
            assert await train(served, served.node("a"), served.node("b")) == 0
        hold.set()
    assert caplog.text.count("wandb:fake does not have the end of the curves yet") == 1
    assert "dtfm-coordinator events --to wandb:fake" in caplog.text


async def test_a_tracker_that_fails_says_so_once_and_then_gets_what_it_has_missed(
    tmp_path: Path, opened: Callable[[Fake], None], caplog: pytest.LogCaptureFixture
) -> None:
    away, failed = threading.Event(), threading.Semaphore(0)
    away.set()

    def fail() -> None:
        if away.is_set():
            failed.release()
            raise OSError(f"203.0.113.7 is away\n{999 * 'x'}")

    fake = Fake(fail)
    opened(fake)
    async with serving(tmp_path) as served:
        async with kept_of(served, FAKE):
            assert await train(served, served.node("a"), served.node("b")) == 0
            for _ in range(5):
                assert await asyncio.to_thread(failed.acquire, timeout=30)
            away.clear()
            assert await asyncio.to_thread(fake.flushed.wait, 30)
        assert fake.steps == [step for step, _ in curves_of(served.store.read())["loss"]]
    told = [each.getMessage() for each in caplog.records if each.name == service.__name__]
    assert told[:1] == [
        "wandb:fake gets no curves: OSError: (address hidden) is away. The run goes on, and the missing points are written "
        "once this works"
    ]
    assert told[1:] == ["wandb:fake has all of the curves again"]


async def test_a_tracker_that_fails_until_the_end_is_named_with_the_line_that_writes_the_rest(
    tmp_path: Path, opened: Callable[[Fake], None], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("away")

    opened(Fake(fail))
    async with serving(tmp_path) as served, kept_of(served, FAKE):
        assert await train(served, served.node("a"), served.node("b")) == 0
    assert caplog.text.count("dtfm-coordinator events --to wandb:fake") == 1


async def test_a_failure_that_lasts_is_said_again_each_hour(
    tmp_path: Path, opened: Callable[[Fake], None], caplog: pytest.LogCaptureFixture
) -> None:
    now, tried = [1e6], threading.Semaphore(0)

    def fail() -> None:
        tried.release()
        raise OSError("away")

    opened(Fake(fail))
    with Store(store_url(tmp_path), write=True) as store:
        write(store, stored_run(), time.time())
        async with tracking(
            [FAKE], tracked(fold([record.event for record in store.read()])), store, lambda _: None, lambda: now[0]
        ):
            for hours in range(3):
                for _ in range(4):
                    assert await asyncio.to_thread(tried.acquire, timeout=30)
                assert caplog.text.count("wandb:fake gets no curves") == hours + 1
                now[0] += service.SAID_AGAIN
                for _ in range(2):
                    assert await asyncio.to_thread(tried.acquire, timeout=30)


async def test_the_table_is_in_no_log_and_no_message_to_nodes(tmp_path: Path) -> None:
    run = run_in(tmp_path, track={"to": ["wandb:s3cret-project"]})
    assert b"s3cret" not in run.message("id").SerializeToString()
    assert "s3cret" not in run.model_dump_json()


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        (["mlflow:x"], 'no tracker that is known: \'mlflow:x\'; give "tensorboard:DIR", "wandb:PROJECT" or "trackio:SPACE"'),
        (["wandb:"], "names no project: 'wandb:'; give one of letters"),
        (["trackio:a/b/c"], "names no project"),
        (["tensorboard:s3://b"], "names no folder: 'tensorboard:s3://b'; give one of this machine"),
        (["tensorboard:x"] * 9, "must be at most 8"),
        ([1], "must be a string"),
    ],
)  # fmt: skip
def test_an_unknown_tracker_is_refused_with_those_that_are_known(to: list[Any], problem: str) -> None:
    with pytest.raises(RunFileError) as refused:
        parse_run(run_table(track={"to": to}), "RUN.toml")
    assert "track.to" in str(refused.value)
    assert problem in str(refused.value)


def test_a_destination_is_named_by_its_tracker_and_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(read_destination("tensorboard:curves")) == f"tensorboard:{tmp_path}/curves"
    assert read_destination("wandb:lab/stories") == Destination("wandb", "lab/stories")
    run = parse_run(run_table(track={"to": ["trackio:x", "trackio:x"]}), "RUN.toml")
    assert run.track.destinations == [Destination("trackio", "x")]
