"""The calls that peers make, by the name in their certificate, so that those of a revoked one end at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio

from dtfm.protos.credentials import certified_name, shown_name

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
Request = TypeVar("Request")
Answer = TypeVar("Answer")
Answered = Callable[[Request, Context], Awaitable[Answer]]
Streamed = Callable[[Request, Context], AsyncIterator[bytes]]

REFUSAL = "REVOKED: the coordinator has revoked this node's access"
ABORT_SECONDS = 1.0
"""How long the refusal of a call in progress may take: it waits behind what the caller does not read."""


class Callers:
    """Wraps a server's methods. Their calls are refused from `revoke` on, and those in progress end."""

    def __init__(self) -> None:
        self._revoked: frozenset[str] = frozenset()
        self._calls: defaultdict[str, dict[asyncio.Task[Any], Context]] = defaultdict(dict)
        self._ending: set[asyncio.Task[None]] = set()

    def answered(self, method: Answered[Request, Answer]) -> Answered[Request, Answer]:
        async def call(request: Request, context: Context) -> Answer:
            with self._admitted(context) as refused:
                if refused:
                    await context.abort(grpc.StatusCode.PERMISSION_DENIED, REFUSAL)
                return await method(request, context)

        return call

    def streamed(self, method: Streamed[Request]) -> Streamed[Request]:
        async def call(request: Request, context: Context) -> AsyncIterator[bytes]:
            with self._admitted(context) as refused:
                if refused:
                    await context.abort(grpc.StatusCode.PERMISSION_DENIED, REFUSAL)
                async for piece in method(request, context):
                    yield piece

        return call

    def revoke(self, names: Iterable[str]) -> None:
        """From now on these may not call either. None may again: it could do so over a connection that it opened before."""
        self._revoked |= frozenset(certified_name(name) for name in names)
        for name in self._revoked & self._calls.keys():
            for task, context in list(self._calls[name].items()):
                ending = asyncio.create_task(_end(task, context))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    @contextlib.contextmanager
    def _admitted(self, context: Context) -> Iterator[bool]:
        """Whether the caller is to be refused."""
        caller, task = shown_name(context.auth_context()), asyncio.current_task()
        assert task is not None
        self._calls[caller][task] = context
        try:
            yield caller in self._revoked
        finally:
            del self._calls[caller][task]
            if not self._calls[caller]:
                del self._calls[caller]


async def _end(task: asyncio.Task[Any], context: Context) -> None:
    # Cancelling the task alone would leave the call open at the other side.
    try:
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, REFUSAL)
    finally:
        task.cancel()
