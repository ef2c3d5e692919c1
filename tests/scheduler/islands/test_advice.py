from __future__ import annotations

from dataclasses import replace

from dtfm.scheduler.cost.exchange import tokens_needed
from dtfm.scheduler.islands.advice import advice
from dtfm.scheduler.islands.layout import lay_out
from dtfm.scheduler.schedule import schedule
from tests.scheduler.islands.test_layout import MEGABIT, cities
from tests.scheduler.llama import llama

WORKLOAD = replace(llama("1.1B"), sent_per_exchanged_byte=4.25 / 32, outer_bytes_per_parameter_byte=1.0)
AMONG = 30, 100


def test_over_home_lines_the_rounds_that_come_soonest_to_the_same_loss_are_advised() -> None:
    cluster = cities([1] * 4, 100 * MEGABIT, 100 * MEGABIT)
    alone = schedule(cluster, llama("1.1B"), evaluations=200).predicted.iteration_seconds
    advised = advice(cluster, WORKLOAD, alone, AMONG)
    assert advised is not None
    gains = {}
    for length in AMONG:
        predicted = lay_out(cluster, WORKLOAD, length=length, evaluations=60).predicted
        each = predicted.iteration_seconds + predicted.exchange_seconds / length
        gains[length] = alone / (each * tokens_needed(4, WORKLOAD, length))
    assert (advised.rounds, advised.islands) == (max(gains, key=lambda each: gains[each]), 4)
    assert abs(advised.speedup / max(gains.values()) - 1) < 0.05
    assert advice(cluster, WORKLOAD, alone / advised.speedup * 1.05, AMONG) is None
    assert advised.gain.startswith("4 islands that exchange every 100 steps reach the same loss some 2.")


def test_what_is_in_force_is_left_only_for_what_gains_enough_more() -> None:
    cluster = cities([1] * 4, 100 * MEGABIT, 100 * MEGABIT)
    alone = schedule(cluster, llama("1.1B"), evaluations=200).predicted.iteration_seconds
    both = [advice(cluster, WORKLOAD, alone, AMONG, standing=standing) for standing in AMONG]
    assert [each and each.rounds for each in both] == [100, 100]  # 100 gains half as much again
    assert both[0] is not None
    for without, standing, found in (
        (1.15, 0, None),
        (1.25, 0, 100),
        (1.05, 100, 100),
        (0.9, 100, 100),
        (0.8, 100, None),
    ):
        at = alone / both[0].speedup * without
        found_now = advice(cluster, WORKLOAD, at, [100], standing=standing)
        assert (found_now and found_now.rounds) == found, (without, standing)


def test_over_fast_lines_and_on_one_node_nothing_is_advised() -> None:
    workload = replace(WORKLOAD, micro_batches=512)
    fast = cities([4], 1250e6, 1250e6)
    assert advice(fast, workload, schedule(fast, workload, evaluations=200).predicted.iteration_seconds, AMONG) is None
    assert advice(fast.only([0]), workload, 100.0, AMONG) is None
    assert advice(cities([2], MEGABIT, MEGABIT), replace(workload, micro_batches=1), 100.0, AMONG) is None
