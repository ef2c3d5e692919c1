"""Where streams share a link the pipeline goes first, then what replicas exchange, then state; and none goes never."""

from __future__ import annotations

import asyncio
import time

import pytest

from dtfm.node.transport.send_priority import PATIENCE, Rank, Uplink

LONG = 1000.0  # a piece that took so long has its stream wait for whoever may go first


@pytest.fixture
async def uplink() -> Uplink:
    return Uplink()


async def waiting(uplink: Uplink, rank: Rank, link: str | None) -> asyncio.Task[None] | None:
    """What gives way, if it does, after a piece that took long."""
    task = asyncio.create_task(uplink.give_way(rank, LONG, link))
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
    uplink: Uplink, ahead: Rank, rank: Rank, gives_way: bool
) -> None:
    uplink.occupy("b", ahead)
    task = await waiting(uplink, rank, "b")
    assert (task is not None) is gives_way
    if task is not None:
        uplink.vacate("b", ahead)
        await asyncio.wait_for(task, 10)


async def test_it_waits_for_all_that_go_first(uplink: Uplink) -> None:
    uplink.occupy("b", Rank.PIPELINE)
    uplink.occupy("c", Rank.REDUCTION)
    task = await waiting(uplink, Rank.STATE, None)
    assert task is not None
    uplink.vacate("b", Rank.PIPELINE)
    assert await asyncio.wait({task}, timeout=0) == (set(), {task})
    uplink.vacate("c", Rank.REDUCTION)
    await asyncio.wait_for(task, 10)


async def test_what_waits_for_another_link_holds_nobody_up(uplink: Uplink) -> None:
    uplink.occupy("b", Rank.PIPELINE)
    assert await waiting(uplink, Rank.REDUCTION, "c") is None


async def test_alone_nobody_waits(uplink: Uplink) -> None:
    uplink.occupy("b", Rank.REDUCTION)
    assert await waiting(uplink, Rank.REDUCTION, "b") is None
    uplink.vacate("b", Rank.REDUCTION)
    assert await waiting(uplink, Rank.STATE, None) is None


async def test_of_the_busiest_link_a_fifth_is_left(uplink: Uplink) -> None:
    uplink.occupy("b", Rank.PIPELINE)  # and never vacates
    began = time.monotonic()
    await asyncio.wait_for(uplink.give_way(Rank.REDUCTION, 0.02, "b"), 10)
    assert time.monotonic() - began >= PATIENCE * 0.02
