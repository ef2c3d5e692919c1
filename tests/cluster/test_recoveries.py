"""The parts of chaos that need no processes: figures from a log, and a seed's decisions."""

from __future__ import annotations

import pytest

from tests.cluster.chaos import schedule_of_kills, slope
from tests.cluster.faults import PAUSE, RESET, Phase, fail, from_text, pair_of_faults, to_text
from tests.cluster.launch import Event
from tests.cluster.recoveries import committed_between, contribution, mean_members, until_commit_without

NODES = ("a", "b", "c")


def committed(time: float, *nodes: str) -> Event:
    return {"event": "step_committed", "time": time, "compute_seconds": dict.fromkeys(nodes, 0.1)}


def told(event: str, time: float, node: str) -> Event:
    return {"event": event, "time": time, "node": node}


#: "b" dies at 2.5, just after its vote for the step that is committed at 3, and returns at 6.
LOG = [
    told("node_joined", 0.0, "a"),
    told("node_joined", 0.0, "b"),
    committed(2.0, "a", "b"),
    committed(3.0, "a", "b"),
    told("node_left", 3.0, "b"),
    committed(4.0, "a"),
    told("node_joined", 6.0, "b"),
    committed(7.0, "a"),
    committed(9.0, "a", "b"),
]


def test_a_commit_of_a_step_that_the_dead_node_had_voted_for_is_no_recovery() -> None:
    assert until_commit_without(LOG, "b", since=2.5) == 1.5


def test_a_return_lasts_from_the_join_to_the_first_step_in_which_the_node_took_part() -> None:
    assert contribution(LOG, "b", since=2.5) == (6.0, 9.0)
    with pytest.raises(StopIteration):
        contribution(LOG, "b", since=6.0)


def test_the_mean_number_of_members_is_weighted_by_time() -> None:
    assert mean_members(LOG, 2.0, 7.0) == pytest.approx((2 * 1 + 1 * 3 + 2 * 1) / 5)


def test_commits_are_counted_after_the_beginning_and_up_to_the_end() -> None:
    assert committed_between(LOG, 2.0, 7.0) == 3


@pytest.mark.parametrize("seed", range(5))
def test_each_period_has_one_kill_in_its_first_part(seed: int) -> None:
    kills = schedule_of_kills(seed, 50.0, NODES, period=10.0)
    assert kills == schedule_of_kills(seed, 50.0, NODES, period=10.0)
    assert [int(kill.at / 10) for kill in kills] == [0, 1, 2, 3, 4]
    assert all(kill.at % 10 < 4 for kill in kills)
    assert {kill.node for kill in kills} <= {"b", "c"}


def test_a_slope_is_not_moved_by_one_large_leap() -> None:
    steady = [(step, 3.0 * step) for step in range(10)]
    assert slope(steady) == 3.0
    assert slope([*steady[:5], *((step, size + 1e6) for step, size in steady[5:])]) != 3.0
    assert slope([*steady[:-1], (9, 1e6)]) == 3.0


def test_faults_survive_conversion_to_text_and_the_seed_decides_them() -> None:
    faults = (
        fail("a").at(step=3, phase=Phase.REDUCE).by(RESET),
        fail("b").at(step=4, phase=Phase.COMMIT).by(PAUSE, seconds=2.5),
    )
    assert from_text(to_text(faults)) == faults
    assert pair_of_faults(7, NODES, 5, pause=1.0) == pair_of_faults(7, NODES, 5, pause=1.0)
    assert len({pair_of_faults(seed, NODES, 5, pause=1.0) for seed in range(20)}) > 10
