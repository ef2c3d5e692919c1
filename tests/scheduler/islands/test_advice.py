from __future__ import annotations

from dataclasses import replace

from dtfm.scheduler.islands.advice import advice
from dtfm.scheduler.islands.layout import lay_out, tokens_needed
from dtfm.scheduler.model.rounds import fitting
from dtfm.scheduler.schedule import schedule
from tests.scheduler.islands.test_layout import MEGABIT, cities
from tests.scheduler.llama import llama

WORKLOAD = replace(llama("1.1B"), sent_per_exchanged_byte=4.25 / 32, outer_bytes_per_parameter_byte=2.0)
AMONG = fitting(1000)[1:]


def test_over_home_lines_the_rounds_that_come_soonest_to_the_same_loss_are_advised() -> None:
    cluster = cities([1] * 4, 100 * MEGABIT, 100 * MEGABIT)
    alone = schedule(cluster, llama("1.1B"), evaluations=200).predicted.iteration_seconds
    advised = advice(cluster, WORKLOAD, alone, AMONG)
    assert advised is not None
    gains = {}
    for rounds in AMONG:
        predicted = lay_out(cluster, WORKLOAD, rounds=rounds, evaluations=60).predicted
        each = predicted.iteration_seconds + predicted.exchange_seconds / rounds.length
        gains[rounds.length] = alone / (each * tokens_needed(4, WORKLOAD, rounds))
    assert (advised.rounds, advised.islands) == (max(gains, key=lambda length: gains[length]), 4)
    assert abs(advised.speedup / max(gains.values()) - 1) < 0.05
    assert advice(cluster, WORKLOAD, alone / advised.speedup * 1.05, AMONG) is None
    assert str(advised).startswith("With [train] rounds = 99, 4 islands would reach the same loss some 2.")


def test_over_fast_lines_and_on_one_node_nothing_is_advised() -> None:
    workload = replace(WORKLOAD, micro_batches=512)
    fast = cities([4], 1250e6, 1250e6)
    assert advice(fast, workload, schedule(fast, workload, evaluations=200).predicted.iteration_seconds, AMONG) is None
    assert advice(fast.only([0]), workload, 100.0, AMONG) is None
    assert advice(cities([2], MEGABIT, MEGABIT), replace(workload, micro_batches=1), 100.0, AMONG) is None
