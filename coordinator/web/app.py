"""Answers the requests to the page's port: its files, the run as JSON, news as server-sent events, metrics, health, operators'
requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.store.store import StoreError
from dtfm.coordinator.view.follower import Follower
from dtfm.coordinator.view.published import for_anybody
from dtfm.coordinator.web.directing import OPERATOR, Ask, directing
from dtfm.coordinator.web.door import STILL, VIEWER, Door

LASTS = "dtfm.lasts"
"""In a request's scope: a function to call when the answer turns out to be a stream without an end."""
HEADERS = [
    ("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
]
"""The headers of every answer: the browser runs, loads and sends nothing from elsewhere."""
MOST_VIEWERS = 20
"""The most pages that hear news at the same time. Operators have places of their own."""
MOST_OF_A_LINK = 4
"""Of these, the most that one link opens."""
MOST_WITHOUT_LINK = 16
"""Of these, the most that this machine's users open without a link."""
MOST_OPERATORS = 8
QUIET_SECONDS = 5.0
"""The longest time without a message to a page. The message moves the page's clocks on, and a broken connection is noticed."""
PAUSE_SECONDS = 1.0
"""Seconds between two messages to a page."""
SLOW_SECONDS = 10.0
"""A page that takes longer than this to accept a message is dropped."""


def make_app(
    follower: Follower,
    ledger: Callable[[], Ledger],
    ask: Ask,
    *,
    by_link: bool = False,
    secure: bool = False,
    shown_at: str = "",
    problem: Callable[[], str] = lambda: "",
) -> Starlette:
    """The page's app.

    ``by_link``: only callers with a link may read the page; otherwise everybody on this machine (see Door). ``shown_at``: see
    directing. ``problem``: why the coordinator is not well; empty: it is well.
    """

    async def state(request: Request) -> Response:
        text = request.query_params.get("at", "")
        if text and not (text.isascii() and text.isdigit() and len(text) < 16):
            return PlainTextResponse("at must be the number of an event", 400)
        try:
            content = await follower.page(int(text) if text else None)
        except StoreError as error:
            return PlainTextResponse(str(error), 503)
        return Response(content, media_type="application/json", headers={"Content-Encoding": "gzip"})

    static = StaticFiles(directory=Path(__file__).parent / "static", html=True)
    routes = [Route("/state", state), _metrics(follower), Route("/news", Viewers(follower)), directing(ask, shown_at)]
    here = [] if by_link else [Middleware(CalledHere)]
    door = Middleware(Door, ledger, not by_link, secure)
    behind = Starlette(routes=[*routes, Mount("/", static)], middleware=[door])
    return Starlette(routes=[_health(follower, problem, says_why=not by_link), Mount("/", behind)], middleware=here)


def make_metrics_app(follower: Follower, problem: Callable[[], str] = lambda: "") -> Starlette:
    """Answers /metrics and /healthz alone, whatever name the caller has for this machine."""
    return Starlette(routes=[_metrics(follower), _health(follower, problem, says_why=True)])


def _health(follower: Follower, problem: Callable[[], str], *, says_why: bool) -> Route:
    """The route for supervisors: 200 while the run makes progress or waits, otherwise 503, with JSON. Callers without a link
    get no reason, because a reason names nodes."""

    async def health(_request: Request) -> Response:
        found = await follower.fitness(problem())
        told = asdict(found) if says_why else {"healthy": found.healthy, "state": found.state}
        shown = {key: for_anybody(value) if isinstance(value, str) else value for key, value in told.items()}
        return JSONResponse(shown, 200 if found.healthy else 503)

    return Route("/healthz", health)


def _metrics(follower: Follower) -> Route:
    async def metrics(_request: Request) -> Response:
        return Response(await follower.metrics(), media_type="text/plain; version=0.0.4")

    return Route("/metrics", metrics)


def is_here(host: str) -> bool:
    """Whether a page with this host, in its URL or its listening address, is reached only from this machine."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class CalledHere:
    """Refuses requests for a page that asks for no link, unless they name this machine's loopback. A stranger's site may have
    pointed its own name there, to read the page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_here(_without_port(Request(scope).headers.get("host", ""))):
            await PlainTextResponse("Invalid host header", 400)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


class Viewers:
    """Tells each page the number of the newest event when there is another one.

    Nothing waits in a queue: a slow page misses numbers, and a page that takes nothing is dropped. Each link has few places.
    Operators have some places that nobody else gets.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._viewers, self._operators = Counter[str](), Counter[str]()  # open pages, by their link; empty: without

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        link, directs = scope.get(VIEWER, ""), OPERATOR in scope
        places, most = (self._operators, MOST_OPERATORS) if directs else (self._viewers, MOST_VIEWERS)
        of_one = MOST_OF_A_LINK if link else MOST_WITHOUT_LINK
        if places[link] >= of_one or places.total() >= most:
            whose = "by this link" if link else "without a link"
            said = f"as many pages are open {whose}, or in all, as there may be ({of_one}, {most}); close one"
            await PlainTextResponse(said, 503)(scope, receive, send)
            return
        places[link] += 1
        scope.get(LASTS, lambda: None)()
        tasks = [
            asyncio.create_task(self._tell(send, scope.get(STILL, lambda: True))),
            asyncio.create_task(_gone(receive)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            places[link] -= 1
            if not places[link]:
                del places[link]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(self, send: Send, still: Callable[[], bool]) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = self._follower.last
        while not self._follower.ended.is_set() and still():
            async with asyncio.timeout(SLOW_SECONDS):
                await send({"type": "http.response.body", "body": f"data: {last}\n\n".encode(), "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_SECONDS):  # wait_for may lose a cancellation in Python 3.11
                    await self._follower.ended.wait()
            last = self._follower.last if self._follower.last != last else await self._follower.news(QUIET_SECONDS)
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
