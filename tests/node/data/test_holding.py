"""The samples come to this machine, and to others, beside everything else."""

from __future__ import annotations

import threading

import pytest

from dtfm.node.data.dataset import Data
from dtfm.node.data.holding import Holding


class Slow(Data):
    """Its samples are there when ``come`` is set; until then each attempt fails with ``problem``, if there is one."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.come, self.asked, self.problem = threading.Event(), 0, problem
        self.written: list[str] = []
        self.wrote = threading.Event()

    def hold(self) -> None:
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        assert self.come.wait(10)

    def publish(self, place: str) -> None:
        self.written.append(place)
        self.wrote.set()
        raise PermissionError("read-only")

    def _take(self, numbers: object) -> None:  # type: ignore[override]
        raise NotImplementedError

    def _learnt(self, numbers: object) -> int:
        raise NotImplementedError


def test_all_who_ask_for_the_same_data_wait_for_one_thread() -> None:
    holding, data = Holding(), Slow()
    first, second = holding.begin(data), holding.begin(data)
    assert not first.done()
    assert not first.cancel()  # one that gives up does not take it from the other
    data.come.set()
    assert (first.result(10), second.result(10), holding.begin(data).result(10)) == (None, None, None)
    assert data.asked == 1


def test_a_process_ends_although_the_data_does_not_come() -> None:
    before = set(threading.enumerate())
    data = Slow()
    Holding().begin(data)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    data.come.set()
    thread.join(10)


def test_what_has_failed_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    holding, data = Holding(), Slow(ValueError("no such file"))
    holding.begin_early(data)
    for thread in threading.enumerate():
        if thread.name == "hold data":
            thread.join(10)
    with pytest.raises(ValueError, match="no such file"):
        holding.begin(data).result(10)
    assert data.asked >= 2
    assert "the data cannot be had yet: no such file" in caplog.text
    data.problem = None
    data.come.set()
    holding.begin(data).result(10)


def test_data_is_published_once_and_a_failure_costs_nothing() -> None:
    holding, data = Holding(), Slow()
    for _ in range(2):
        holding.publish(data, "place")
    assert data.wrote.wait(10)
    assert data.written == ["place"]
