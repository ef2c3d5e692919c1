"""How this process reaches nodes over lent connections: gRPC can only dial, so it dials a Unix socket of this process.

Each node that is reached so has one, in a folder that only this user may enter. Who connects to it gets what ``reach`` returns.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial

from dtfm.node.transport.lent_connections import NotLent
from dtfm.node.transport.pipes import PIECE, Pipe, join, socket_pipe
from dtfm.protos.identity.credentials import CERTIFIED_SUFFIX, certified_name

#: Returns a connection to the node of this name. Raises NotLent.
Reach = Callable[[str], Awaitable[Pipe]]


class Doors:
    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # until it is needed
        self._servers: dict[str, asyncio.Task[asyncio.Server]] = {}
        self._connections: set[asyncio.Task[None]] = set()

    def to(self, node: str) -> str:
        """Where gRPC is to dial for the node. On the event loop."""
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="dtfm-")
        path = f"{self._folder.name}/{certified_name(node).removesuffix(CERTIFIED_SUFFIX)}"
        if node not in self._servers:
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(path)
            listening.listen()  # now: gRPC may dial before the server has begun
            serving = asyncio.start_unix_server(partial(self._serve, node), sock=listening, limit=PIECE)
            self._servers[node] = asyncio.create_task(serving)
        return f"unix:{path}"

    async def stop(self) -> None:
        for server in self._servers.values():
            (await server).close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._folder is not None:
            self._folder.cleanup()

    async def _serve(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        pipe = socket_pipe(reader, writer)
        try:
            await join(pipe, await self._reach(node))
        except (NotLent, asyncio.CancelledError):
            pass  # the channel says that nobody answers; or this process ends
        finally:
            pipe.close()
            self._connections.discard(task)
