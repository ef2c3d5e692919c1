"""A reserve takes over when the active coordinator is gone, and of two that believe to be active only one can write."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests import postgres
from tests.cluster.exact import assert_exact
from tests.cluster.launch import Cluster, Process
from tests.cluster.ports import free_port
from tests.cluster.runs import GPT2, run_file
from tests.cluster.test_life_cycle import command

LEASE = 3.0
LEARNING_RATE = 1e-4
"""So low that roundings do not grow in some hundreds of steps."""


class Pair(Cluster):
    """A coordinator on a PostgreSQL of its own, and a reserve."""

    def __init__(self, folder: Path) -> None:
        text = run_file(model=GPT2, stages=[1, 1], steps=100_000, lease=LEASE, learning_rate=LEARNING_RATE)
        super().__init__(folder, text, store=postgres.database(folder), start=False)
        self.places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        advertised = [option for place in self.places for option in ("--advertise", place)]
        self.options = ("--authority", str(folder / "authority.pem"), *advertised)

    def __enter__(self) -> Pair:
        super().__enter__()
        self.address = self.places[0]
        self.start_coordinator(*self.options)
        self.reserve = self.start_reserve(self.places[1])
        self.add("a")
        self.add("b")
        return self

    def start_reserve(self, place: str) -> Process:
        reserve = self.start_another(place, "--reserve", *self.options)
        reserve.wait_for_error("This is a reserve")
        return reserve

    def takes_over(self, before: int) -> None:
        """Waits until the reserve has committed a step. ``before``: the number of events when the other one went."""
        self.coordinator = self.reserve
        listening = self.wait_for("listening", after=before)
        self.address = listening["address"]
        self.wait_for("step_committed", after=self.events.index(listening, before))

    def kill_the_active(self) -> float:
        """Returns the seconds until the next commit."""
        assert self.coordinator is not None
        killed, place = self.coordinator, self.address
        before, at = len(self.events), time.time()
        killed.send(signal.SIGKILL)
        killed.wait(10)
        gone = time.time()
        self.takes_over(before)
        first = next(e for e in self.log() if e["event"] == "step_committed" and e["time"] > gone)
        self.reserve = self.start_reserve(place)
        return float(first["time"]) - at

    def end(self) -> None:
        """Stops the run, which ends both, and checks the log that they leave behind: no step is lost, and none is doubled."""
        assert self.coordinator is not None
        command(self, "stop")
        assert (self.coordinator.wait(30), self.reserve.wait(30)) == (0, 0)
        assert "The run was stopped, so no reserve is needed." in self.reserve.errors
        told = [e["step"] for e in self.of("step_committed")]
        committed = [e["step"] for e in self.log() if e["event"] == "step_committed"]
        assert committed == list(range(1, len(committed) + 1))
        assert set(told) <= set(committed)
        assert len(told) == len(set(told))
        assert not self.of("rolled_back")
        assert_exact(self)


@pytest.mark.parametrize(
    ("kills", "most"),
    [(1, LEASE + 20), pytest.param(20, LEASE + 2, marks=[pytest.mark.soak, pytest.mark.timeout(900)])],  # alone
)
def test_a_reserve_takes_over_and_no_step_is_lost_or_doubled(tmp_path: Path, kills: int, most: float) -> None:
    moments, took = random.Random(kills), list[float]()
    with Pair(tmp_path) as cluster:
        for _ in range(kills):
            step = cluster.wait_for("step_committed", after=len(cluster.events))["step"] + moments.randrange(10)
            cluster.wait_for("step_committed", where=lambda e, step=step: e["step"] >= step)  # type: ignore[misc]
            took.append(cluster.kill_the_active())
        cluster.end()
    print("seconds until the next commit:", " ".join(f"{seconds:.2f}" for seconds in sorted(took)))
    assert max(took) < most


@pytest.mark.soak
def test_one_that_was_stopped_and_wakes_up_when_the_reserve_is_active_writes_nothing_and_ends(tmp_path: Path) -> None:
    with Pair(tmp_path) as cluster:
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        stopped = cluster.coordinator
        assert stopped is not None
        stopped.send(signal.SIGSTOP)
        place = cluster.address
        cluster.takes_over(len(cluster.events))
        stopped.send(signal.SIGCONT)
        assert stopped.wait(20) == 1
        assert "another coordinator has taken this run over; this one writes nothing more, and ends" in stopped.errors
        cluster.reserve = cluster.start_reserve(place)
        cluster.end()
