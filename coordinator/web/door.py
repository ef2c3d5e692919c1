"""Decides who may read the page, and direct the run there: callers that have shown a link. The browser keeps the link as a
cookie."""

from __future__ import annotations

import html
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dtfm.coordinator.core.members.invitations import check_viewer
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.service.pasted_line import LINK, read_link
from dtfm.coordinator.web.directing import OPERATOR
from dtfm.protos.identity.access import Role

LET_IN = "dtfm.let_in"
"""In a request's scope: a function to call with the invitation's id when the caller is no stranger. Returns False if too many
connections show that link."""
VIEWER = "dtfm.viewer"
"""In a request's scope: the id of the invitation whose link was shown; missing without one."""
STILL = "dtfm.still"
"""In a request's scope: whether the caller may go on reading."""
_NEW_LINK = "Whoever directs the run makes a new link: <code>dtfm-coordinator invite --role viewer</code>"


class Door:
    """Stands before the ``app``. It answers callers without a good link itself; if it ``stands_open``, only callers that follow
    a bad link. ``ledger`` returns the present ledger. ``secure``: the page is reached over https."""

    def __init__(self, app: ASGIApp, ledger: Callable[[], Ledger], stands_open: bool, secure: bool) -> None:
        self._app = app
        self._ledger = ledger
        self._stands_open = stands_open
        self._secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, ledger, now = Request(scope), self._ledger(), time.time()
        cookie, followed = f"dtfm-{ledger.run_id}", request.query_params.get(LINK, "")
        try:
            shown = followed or request.cookies.get(cookie, "")
            if not shown:
                raise ValueError("it needs a link, and this browser has shown none")
            id, secret = read_link(shown)
            invited = check_viewer(ledger, id, secret, now)
        except ValueError as problem:
            if self._stands_open and not followed:
                await self._app(scope, receive, send)
                return
            said = f"<p>This page does not open: {html.escape(str(problem))}.</p><p>{_NEW_LINK}</p>"
            # Over a new connection each time: a stranger may have only few.
            await HTMLResponse(_page("No access", said), 403, {"Connection": "close"})(scope, receive, send)
            return
        if (let_in := scope.get(LET_IN)) is not None and not let_in(id):
            said = (
                "<p>By this link, or by all, as many connections are open as there may be. Close some of its pages.</p>"
            )
            await HTMLResponse(_page("Too many connections", said), 503, {"Connection": "close"})(scope, receive, send)
            return
        if not followed:

            def still() -> bool:
                known = self._ledger().access.invitations.get(id)
                return known is not None and known.opens_page(time.time())

            directs = {OPERATOR: id} if invited.role == Role.OPERATOR else {}
            await self._app({**scope, STILL: still, VIEWER: id, **directs}, receive, send)
            return
        # A redirection would not do: the browser would follow it as a part of the click elsewhere, without this cookie.
        onwards = '<meta http-equiv="refresh" content="0; url=./"><link rel="icon" href="icon.svg">'
        answer = HTMLResponse(_page("dtfm", '<p><a href="./">To the page</a></p>', onwards))
        answer.set_cookie(
            cookie, shown, int(invited.expires - now), secure=self._secure, httponly=True, samesite="strict"
        )
        await answer(scope, receive, send)


def _page(title: str, body: str, head: str = "") -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>{head}</head>'
        f"<body><main><h1>{title}</h1>{body}</main></body></html>"
    )
