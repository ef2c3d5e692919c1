"""The pipes of a key that stand still are few: the one that stands still for longest is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dtfm.node.transport.backlogs import MOST_BEHIND, SHORT_SECONDS, Backlogs
from dtfm.node.transport.pipes import Pipe, read_ahead


class Source:
    """Bytes come out of it as ``put`` puts them in. ``closed``: somebody has closed the pipe."""

    def __init__(self, backlogs: Backlogs, key: str) -> None:
        self.put, self.closed = asyncio.Queue[bytes](), asyncio.Event()
        self.pipe = backlogs.watched(Pipe(self.put.get, self._write, self.closed.set), key)

    async def _write(self, data: bytes) -> None:
        raise AssertionError("nobody writes to a source")

    async def stand_still(self) -> None:
        """One piece is read, and nobody asks for the next."""
        self.put.put_nowait(b"a piece")
        await self.pipe.read()


@pytest.fixture
async def behind() -> AsyncIterator[tuple[Backlogs, list[Source]]]:
    """As many of key one's as may be, the first one first."""
    backlogs, sources = Backlogs(), []
    for _ in range(MOST_BEHIND):
        sources.append(Source(backlogs, "one"))
        await sources[-1].stand_still()
    await asyncio.sleep(2 * SHORT_SECONDS)
    yield backlogs, sources
    for source in sources:
        source.pipe.close()


async def test_one_too_many_closes_the_oldest(behind: tuple[Backlogs, list[Source]]) -> None:
    backlogs, sources = behind
    sources.append(Source(backlogs, "one"))
    await sources[-1].stand_still()
    await sources[0].closed.wait()
    assert not any(source.closed.is_set() for source in sources[1:])


async def test_each_key_has_its_own(behind: tuple[Backlogs, list[Source]]) -> None:
    backlogs, sources = behind
    sources.append(Source(backlogs, "another"))
    await sources[-1].stand_still()
    await asyncio.sleep(2 * SHORT_SECONDS)
    assert not any(source.closed.is_set() for source in sources)


async def test_what_has_caught_up_does_not_count(behind: tuple[Backlogs, list[Source]]) -> None:
    backlogs, sources = behind
    reading = asyncio.ensure_future(sources[0].pipe.read())
    await asyncio.sleep(2 * SHORT_SECONDS)
    sources[0].put.put_nowait(b"late")
    assert await reading == b"late"
    sources.append(Source(backlogs, "one"))
    await sources[-1].stand_still()
    await sources[1].closed.wait()
    assert not sources[0].closed.is_set(), "it stands still for a shorter time than the next one"


async def test_what_has_more_to_say_has_not_caught_up(behind: tuple[Backlogs, list[Source]]) -> None:
    backlogs, sources = behind
    await sources[0].stand_still()
    sources.append(Source(backlogs, "one"))
    await sources[-1].stand_still()
    await sources[0].closed.wait()


async def test_the_first_bytes_are_read_ahead_and_not_lost() -> None:
    source = Source(Backlogs(), "one")
    pipe, spoken = read_ahead(source.pipe)
    source.put.put_nowait(b"first")
    source.put.put_nowait(b"second")
    await asyncio.wait([spoken])
    assert [await pipe.read(), await pipe.read()] == [b"first", b"second"]
    pipe.close()
