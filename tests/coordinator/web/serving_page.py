"""The page of a stored run, served for a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.transition import Granted, Request
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.store.store import Record, Store
from dtfm.coordinator.view.follower import Follower
from dtfm.coordinator.view.story import Story
from dtfm.coordinator.web.app import make_app, make_metrics_app
from dtfm.coordinator.web.serving import bind, bind_page, link_to, page_served
from dtfm.protos import control_pb2 as wire
from tests.coordinator.stores import store_url
from tests.coordinator.web.stored_run import write


async def connected(link: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*urlsplit(link).netloc.split(":"))


async def asked(link: str, path: str, host: str = "", cookie: str = "") -> tuple[int, dict[str, str], bytes]:
    """The answer's status, headers and content. ``host``: the name that the page is called by; empty: the link's."""
    reader, writer = await connected(link)
    lines = [f"GET {path} HTTP/1.1", f"Host: {host or urlsplit(link).netloc}", "Connection: close"]
    writer.write("\r\n".join([*lines, *([f"Cookie: {cookie}"] if cookie else []), "", ""]).encode())
    head, _, content = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), content


@dataclass(slots=True)
class PageServed:
    """``link`` opens it; ``metrics`` is the other port."""

    link: str
    metrics: str
    _store: Store
    _records: list[Record]
    _follower: Follower
    _began: float

    def happen(self, until: int | None = None) -> None:
        """The coordinator writes the next records, up to this number, or all."""
        there = self._store.last
        write(self._store, self._records[there:until], self._began)
        self._store._last += len(self._records[there:until])
        if self._records[: self._store.last]:
            self._follower.wake(self._records[self._store.last - 1])


async def refuse(_request: Request | wire.PlanNowRequest, _by: str) -> Granted:
    raise Refused(wire.ROLE, "nobody may")


@asynccontextmanager
async def page_of(
    records: list[Record], folder: Path, so_far: int | None = None, later: float = 1.0, problem: str = ""
) -> AsyncIterator[PageServed]:
    """The page, when the first ``so_far`` of the records are written, or all, ``later`` seconds after the last. ``problem``: why
    the coordinator is not well."""
    with Store(store_url(folder), write=True) as store:
        page, metrics = bind_page("127.0.0.1:0"), bind("127.0.0.1:0", "--metrics")
        follower = Follower(store, Story())
        began = time.time() - records[-1].time - later
        served = PageServed(link_to(page), link_to(metrics), store, records, follower, began)
        served.happen(so_far)
        following = asyncio.create_task(follower.follow())
        async with (
            page_served(page, make_app(follower, Ledger, refuse, problem=lambda: problem)),
            page_served(metrics, make_metrics_app(follower), from_anywhere=True),
        ):
            yield served
            following.cancel()
            await asyncio.wait([following])
            await follower.close()
