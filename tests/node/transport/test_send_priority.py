"""On a link the pipeline goes first, then what replicas exchange, then state; and every stream gets its turn."""

from __future__ import annotations

import asyncio
import time

import pytest

from dtfm.node.transport.send_priority import PATIENCE, Rank, SendPriority

LONG = 1000.0  # seconds that a piece took: its stream then waits for others practically without end


@pytest.fixture
async def priority() -> SendPriority:
    return SendPriority()


async def waiting(priority: SendPriority, rank: Rank, link: str | None) -> asyncio.Task[None] | None:
    """The task that gives way after a piece that took long; None if it need not."""
    task = asyncio.create_task(priority.give_way(rank, LONG, link))
    for _ in range(3):
        await asyncio.sleep(0)
    return None if task.done() else task


@pytest.mark.parametrize(
    ("ahead", "rank", "gives_way"),
    [
        (Rank.PIPELINE, Rank.REDUCTION, True),
        (Rank.PIPELINE, Rank.STATE, True),
        (Rank.REDUCTION, Rank.STATE, True),
        (Rank.REDUCTION, Rank.PIPELINE, False),
        (Rank.REDUCTION, Rank.REDUCTION, False),
        (Rank.PIPELINE, Rank.PIPELINE, False),
    ],
)
async def test_the_greater_rank_waits_until_nothing_of_a_smaller_one_does(
    priority: SendPriority, ahead: Rank, rank: Rank, gives_way: bool
) -> None:
    priority.occupy("b", ahead)
    task = await waiting(priority, rank, "b")
    assert (task is not None) is gives_way
    if task is not None:
        priority.vacate("b", ahead)
        await asyncio.wait_for(task, 10)


async def test_it_waits_for_all_streams_that_go_first(priority: SendPriority) -> None:
    priority.occupy("b", Rank.PIPELINE)
    priority.occupy("c", Rank.REDUCTION)
    task = await waiting(priority, Rank.STATE, None)
    assert task is not None
    priority.vacate("b", Rank.PIPELINE)
    assert await asyncio.wait({task}, timeout=0) == (set(), {task})
    priority.vacate("c", Rank.REDUCTION)
    await asyncio.wait_for(task, 10)


async def test_a_stream_on_another_link_is_not_waited_for(priority: SendPriority) -> None:
    priority.occupy("b", Rank.PIPELINE)
    assert await waiting(priority, Rank.REDUCTION, "c") is None


async def test_a_single_stream_never_waits(priority: SendPriority) -> None:
    priority.occupy("b", Rank.REDUCTION)
    assert await waiting(priority, Rank.REDUCTION, "b") is None
    priority.vacate("b", Rank.REDUCTION)
    assert await waiting(priority, Rank.STATE, None) is None


async def test_a_fifth_of_the_busiest_link_is_left(priority: SendPriority) -> None:
    priority.occupy("b", Rank.PIPELINE)  # and never vacates
    began = time.monotonic()
    await asyncio.wait_for(priority.give_way(Rank.REDUCTION, 0.02, "b"), 10)
    assert time.monotonic() - began >= PATIENCE * 0.02
