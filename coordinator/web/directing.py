"""An operator's requests on the page to the coordinator: the same requests as the command line's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from google.protobuf import json_format
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from dtfm.coordinator.core import transition as t
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.access import Role

Ask = Callable[[t.Request, str], Awaitable[t.Granted]]
"""See `Server.ask`."""

OPERATOR = "dtfm.operator"
"""In a request's scope: the id of the operator's invitation that opened the page; missing for everybody else."""
JSON = "application/json"
_REQUESTS = {
    "plan-now": wire.PlanNowRequest,
    "invite": wire.InviteRequest,
    "revoke": wire.RevokeRequest,
    "expel": wire.ExpelRequest,
    "forgive": wire.ForgiveRequest,
    "steer": wire.SteerRequest,
}
_MOST_BYTES = 4096


def directing(ask: Ask, shown_at: str = "") -> Route:
    """The route for operators. GET tells whether the reader is an operator. POST makes the request that the path's end names:
    the body has its fields as JSON. ``shown_at``: the URL of the page at a proxy; empty: none."""

    async def answer(request: Request) -> Response:
        by, make = request.scope.get(OPERATOR, ""), _REQUESTS.get(request.path_params["what"])
        if request.method == "GET":
            return JSONResponse({"directs": bool(by)})
        if not _is_own(request, shown_at):
            return PlainTextResponse("another site's page has sent this; open the page itself", 403)
        # Another site's page cannot send this type without asking here first, and its requests come without the cookie.
        if make is None or request.headers.get("content-type") != JSON:
            return PlainTextResponse(f"it must be {JSON}, for one of {', '.join(_REQUESTS)}", 400)
        if not by:
            link = f"dtfm-coordinator invite --role {Role.OPERATOR}"
            return PlainTextResponse(f"this is for the role {Role.OPERATOR}: open the page by the link of {link}", 403)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_BYTES:
                return PlainTextResponse(f"it is longer than {_MOST_BYTES} bytes", 413)
        try:
            reply = await ask(json_format.Parse(body, make()), by)
        except (ValueError, json_format.Error) as problem:  # a refusal is a ValueError
            return PlainTextResponse(str(problem), 400)
        return JSONResponse(json_format.MessageToDict(reply))

    return Route("/ask/{what}", answer, methods=["GET", "POST"])


def _is_own(request: Request, shown_at: str) -> bool:
    """Whether the page itself has sent the request, or no page: browsers say which page, and other programs need not. A proxy
    that speaks https to browsers may pass on another scheme. So only hosts and ports are compared."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none"):
        return False
    own = {request.headers.get("host", "").lower(), urlsplit(shown_at).netloc.lower()} - {""}
    return origin is None or urlsplit(origin).netloc.lower() in own
