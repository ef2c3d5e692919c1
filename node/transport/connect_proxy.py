"""The proxy through which this process reaches nodes over lent connections.

A channel with the option ``grpc.http_proxy`` asks it for a connection to a certified name (HTTP CONNECT, RFC 9110, 9.3.6). It
listens on loopback alone, takes only who knows its password, and connects to nothing but what ``reach`` returns.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import secrets
from collections.abc import Awaitable, Callable

from dtfm.node.transport.lent_connections import NotLent
from dtfm.node.transport.pipes import PIECE, Pipe, join, socket_pipe
from dtfm.protos.credentials import CERTIFIED_SUFFIX

MOST_HEAD_BYTES = 8 << 10
HEAD_SECONDS = 5.0
"""What a request may take until its empty line."""
MOST_CONNECTIONS = 256

#: Returns a connection to the node with this certified name. Raises NotLent.
Reach = Callable[[str], Awaitable[Pipe]]


class ConnectProxy:
    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._password = secrets.token_hex(16)
        self._places = asyncio.Semaphore(MOST_CONNECTIONS)
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Returns the URL for ``grpc.http_proxy``."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PIECE)
        port = self._server.sockets[0].getsockname()[1]
        return f"http://dtfm:{self._password}@127.0.0.1:{port}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        pipe = socket_pipe(reader, writer)
        try:
            if self._places.locked():
                return
            async with self._places:
                status, other = await self._answer(reader)
                writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
                if other is not None:
                    await join(pipe, other)
        except (OSError, asyncio.CancelledError):
            pass  # the caller is gone, or this process ends
        finally:
            pipe.close()
            self._connections.discard(task)

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Pipe | None]:
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return "400 Bad Request", None
        request, *fields = head.decode("latin-1").split("\r\n")
        if len(head) > MOST_HEAD_BYTES or not self._knows_password(fields):
            return "407 Proxy Authentication Required", None
        method, _, rest = request.partition(" ")
        name = rest.partition(" ")[0].rpartition(":")[0]
        if method != "CONNECT" or not name.endswith(CERTIFIED_SUFFIX):
            return "403 Only CONNECT to a node", None
        try:
            return "200 OK", await self._reach(name)
        except NotLent as why:
            return f"502 {why}", None

    def _knows_password(self, fields: list[str]) -> bool:
        wanted = b"Basic " + base64.b64encode(f"dtfm:{self._password}".encode())
        given = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        return hmac.compare_digest(given.get("proxy-authorization", "").encode(), wanted)
