"""Pieces that arrive on the event loop and are taken in a thread: `node/state/gathered.py`."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, strategies as st

from dtfm.node.state import gathered
from dtfm.node.state.gathered import Gathered


class Whole:
    """The taken pieces, and their threads."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.threads: set[threading.Thread] = set()

    def take(self, pieces: memoryview, offset: int) -> None:
        self.threads.add(threading.current_thread())
        self.bytes[offset : offset + len(pieces)] = pieces


@given(pieces=st.lists(st.binary(max_size=9), max_size=12), at_once=st.integers(1, 20))
def test_all_is_taken_in_order_and_never_on_the_event_loop(pieces: list[bytes], at_once: int) -> None:
    whole = Whole()

    async def arrive() -> None:
        come = Gathered(whole.take)
        for piece in pieces:
            await come.add(memoryview(piece))
            assert come.have - len(whole.bytes) < at_once
        await come.flush()
        assert come.have == len(whole.bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered, "TAKEN_AT_ONCE", at_once)
        asyncio.run(arrive())
    assert whole.bytes == b"".join(pieces)
    assert threading.current_thread() not in whole.threads


async def test_what_comes_again_begins_at_the_first_byte() -> None:
    whole = Whole()
    come = Gathered(whole.take)
    await come.add(memoryview(b"wrong"))
    come.begin_again()
    await come.add(memoryview(b"right!"))
    await come.flush()
    assert whole.bytes == b"right!"


class Slowly:
    """A thread's work that waits to be let go on, and may fail then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.started, self.go_on, self.done = threading.Event(), threading.Event(), threading.Event()
        self._error = error

    def take(self, _: memoryview, _offset: int) -> None:
        self.started.set()
        self.go_on.wait(20)
        self.done.set()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("times", [1, 2])
async def test_who_is_cancelled_has_nothing_written_behind_his_back(times: int) -> None:
    slowly = Slowly()
    come = Gathered(slowly.take)
    await come.add(memoryview(b"x"))
    flushing = asyncio.create_task(come.flush())
    await asyncio.to_thread(slowly.started.wait, 20)
    for _ in range(times):
        flushing.cancel()
        await asyncio.sleep(0)  # the cancellation arrives
        await asyncio.sleep(0)
        assert not flushing.done()
    slowly.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    assert slowly.done.is_set()
    assert come.have == 1


async def test_who_is_cancelled_while_taking_fails_hears_of_the_failure() -> None:
    """Else the next donor would be asked for the bytes after the missing ones."""
    slowly = Slowly(OSError("the disk is full"))
    come = Gathered(slowly.take)
    await come.add(memoryview(b"x"))
    flushing = asyncio.create_task(come.flush())
    await asyncio.to_thread(slowly.started.wait, 20)
    flushing.cancel()
    await asyncio.sleep(0)
    slowly.go_on.set()
    with pytest.raises(OSError, match="the disk is full"):
        await flushing
    assert come.have == 0
