"""What an island had trained when it was given up comes again."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, strategies as st

from dtfm.coordinator.log.debts import Debts
from dtfm.scheduler.model.owed import NOTHING_OWED, Owed, Range
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, joined
from dtfm.scheduler.model.rounds import Rounds

OF_BATCH = 7


def of(numbers: Sequence[int], batches: int = 1) -> Plan:
    """These islands, which share a step of so many batches as evenly as they can."""
    whole = OF_BATCH * batches
    borders = [whole * index // len(numbers) for index in range(len(numbers) + 1)]
    shares = [after - before for before, after in itertools.pairwise(borders)]
    stages = [Stage((0, 1), (f"n{number}",), (), island=number) for number in numbers]
    plan = joined([from_routes(1, [stage], [(stage.replicas, n)]) for stage, n in zip(stages, shares, strict=True)], 1)
    return replace(plan, rounds=Rounds(0, 100, 10, batches_each=batches))


def flat(ranges: Sequence[Range]) -> list[int]:
    return [number for each in ranges for number in range(*each)]


rounds = st.lists(st.lists(st.sets(st.integers(0, 4), max_size=2), min_size=1, max_size=5), min_size=1, max_size=6)
"""Of each round, of each step that trains, the islands that are lost after it; the last is never lost."""


@given(rounds=rounds, grown=st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_every_micro_batch_is_trained_once_by_an_island_that_brings_it_to_an_exchange(
    rounds: list[list[set[int]]], grown: list[int]
) -> None:
    """Each round has as many batches in a step as its ``grown`` says, whichever islands are lost in it."""
    debts, batches, kept = Debts(), 0, Counter[int]()
    for losses, each in zip(rounds, grown, strict=False):
        living, learnt = [0, 1, 2, 3, 4, 5], dict[int, list[int]]()
        for lost in losses:
            plan = of(living, each)
            plan = replace(plan, owed=debts.under(plan, batches))
            debts = debts.with_plan(plan)
            assert dict(debts.counted(plan, batches).had) == {i: len(had) for i, had in learnt.items() if i in living}
            for island, places in plan.places.items():
                learnt.setdefault(island, []).extend(flat([*plan.owed.taken(batches, places, OF_BATCH)]))
            debts, batches = debts.with_step(plan, batches, 1e-3, at_rest=False), batches + each
            living = [island for island in living if island not in lost]
        plan = of(living, each)
        plan = replace(plan, owed=debts.under(plan, batches))
        debts = debts.with_plan(plan).with_step(plan, batches, 1e-3, at_rest=True)
        kept.update(number for island in living for number in learnt.get(island, ()))
    owed = flat(debts.adopted[-1].left(batches, OF_BATCH))
    assert sorted([*kept.elements(), *owed]) == [*range(len(owed) + kept.total())]


def test_lost_samples_come_first_in_order_and_then_samples_that_nobody_has_had() -> None:
    debts, both = Debts(), of([0, 1])
    for batches in (0, 1):
        debts = debts.with_step(both, batches, 1e-3, at_rest=False)
    owed = debts.under(of([0]), 2)
    assert owed == Owed(2, ((3, 7), (10, 14)), 14)
    assert [flat([*owed.taken(batches, range(OF_BATCH), OF_BATCH)]) for batches in (2, 3)] == [
        [3, 4, 5, 6, 10, 11, 12],
        [13, 14, 15, 16, 17, 18, 19],
    ]
    assert flat([*owed.taken(3, range(1, 2), OF_BATCH)]) == [14]
    assert owed.left(3, OF_BATCH) == ((13, 14),)
    assert not owed.left(4, OF_BATCH)


def test_an_island_that_is_back_before_a_step_is_committed_without_it_has_lost_nothing() -> None:
    debts, both = Debts().with_step(of([0, 1]), 0, 1e-3, at_rest=False), of([0, 1])
    alone = replace(of([0]), owed=debts.under(of([0]), 1))
    assert alone.owed.again
    assert debts.with_plan(alone).under(both, 1) == NOTHING_OWED


def test_what_was_lost_after_the_step_to_which_the_run_goes_back_was_not_lost() -> None:
    debts = Debts().with_step(of([0, 1]), 4, 1e-3, at_rest=False)
    debts = debts.with_plan(replace(of([0]), owed=debts.under(of([0]), 5)))
    assert debts.back_to(5).committed == debts.adopted[-1]
    assert debts.back_to(4) == Debts()
