"""The calls that peers make, by the name in their certificate, so that those of a revoked or quarantined one end at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio

from dtfm.protos.connection import DEFAULT_LEASE
from dtfm.protos.credentials import certified_name, shown_name
from dtfm.protos.frame import STATE_CHUNK_BYTES
from dtfm.protos.token_bucket import TokenBucket

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
Request = TypeVar("Request")
Answer = TypeVar("Answer")
Answered = Callable[[Request, Context], Awaitable[Answer]]
Streamed = Callable[[Request, Context], AsyncIterator[bytes]]

REVOKED = "REVOKED: the coordinator has revoked this node's access"
QUARANTINED = "QUARANTINED: this node may take no part, until an operator forgives it"
CALLS_PER_SECOND, CALLS_AT_ONCE = 500.0, 2000.0
"""What one peer may call over a while, and at once; who calls more often is answered later. A node that recovers makes a call for
each bucket, and one that measures its links a dozen."""
MOST_WAITING = 256
"""Calls of one peer that wait for that. A further one is refused."""
BUSY = f"BUSY: this peer has made more than {CALLS_PER_SECOND:.0f} calls a second, and {MOST_WAITING} of them wait"
UNREAD = grpc.StatusCode.DEADLINE_EXCEEDED, "UNREAD: for a lease nobody has read what this call sends"
ABORT_SECONDS = 1.0
"""How long the refusal of a call in progress may take: it waits behind what the caller does not read."""


class Callers:
    """Wraps a server's methods. A peer's calls are answered at a bounded rate. Those of a revoked or quarantined one are refused,
    and those in progress end. ``called`` has the connections on which a member has called (context.peer()), also those that are
    gone, until somebody takes them out. A stream that nobody reads for ``lease`` seconds ends."""

    def __init__(self) -> None:
        self._revoked: frozenset[str] = frozenset()
        self._quarantined: frozenset[str] = frozenset()
        self._calls: defaultdict[str, dict[asyncio.Task[Any], Context]] = defaultdict(dict)
        self._ending: set[asyncio.Task[None]] = set()
        self._budgets: dict[str, TokenBucket] = {}
        self._waiting: Counter[str] = Counter()
        self.called: set[str] = set()
        self.lease = DEFAULT_LEASE

    def answered(self, method: Answered[Request, Answer]) -> Answered[Request, Answer]:
        async def call(request: Request, context: Context) -> Answer:
            with self._admitted(context) as refused:
                if refused:
                    await context.abort(grpc.StatusCode.PERMISSION_DENIED, refused)
                await self._turn(context)
                return await method(request, context)

        return call

    def streamed(self, method: Streamed[Request]) -> Streamed[Request]:
        async def call(request: Request, context: Context) -> AsyncIterator[bytes]:
            with self._admitted(context) as refused:
                if refused:
                    await context.abort(grpc.StatusCode.PERMISSION_DENIED, refused)
                await self._turn(context)
                loop, task = asyncio.get_running_loop(), asyncio.current_task()
                assert task is not None
                async for piece in method(request, context):
                    patience = self.lease * max(
                        1.0, len(piece) / STATE_CHUNK_BYTES
                    )  # a slow link takes longer for more
                    unread = loop.call_later(patience, self._end, task, context, *UNREAD)
                    try:
                        yield piece
                    finally:
                        unread.cancel()

        return call

    def revoke(self, names: Iterable[str]) -> None:
        """From now on these may not call either. None may again: it could do so over a connection that it opened before."""
        self._revoked |= frozenset(certified_name(name) for name in names)
        self._end_calls()

    def quarantine(self, names: Iterable[str]) -> None:
        """From now on these may not call, and who was named before may call again."""
        self._quarantined = frozenset(certified_name(name) for name in names)
        self._end_calls()

    def _refusal(self, caller: str) -> str:
        """Empty: the caller may call."""
        return REVOKED if caller in self._revoked else QUARANTINED if caller in self._quarantined else ""

    def _end_calls(self) -> None:
        for name in (self._revoked | self._quarantined) & self._calls.keys():
            for task, context in list(self._calls[name].items()):
                self._end(task, context, grpc.StatusCode.PERMISSION_DENIED, self._refusal(name))

    def _end(self, task: asyncio.Task[Any], context: Context, code: grpc.StatusCode, why: str) -> None:
        ending = asyncio.create_task(_end(task, context, code, why))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _turn(self, context: Context) -> None:
        """Waits until the caller may make another call. Ends the call if too many of its wait."""
        caller = shown_name(context.auth_context())
        budget = self._budgets.setdefault(caller, TokenBucket(CALLS_PER_SECOND, CALLS_AT_ONCE))
        if self._waiting[caller] >= MOST_WAITING:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, BUSY)
        if pause := budget.draw(time.monotonic()):
            self._waiting[caller] += 1
            try:
                await asyncio.sleep(pause)
            finally:
                self._waiting[caller] -= 1

    @contextlib.contextmanager
    def _admitted(self, context: Context) -> Iterator[str]:
        """The refusal, if the caller may not call."""
        caller, task = shown_name(context.auth_context()), asyncio.current_task()
        assert task is not None
        self._calls[caller][task] = context
        self.called.add(context.peer())
        try:
            yield self._refusal(caller)
        finally:
            del self._calls[caller][task]
            if not self._calls[caller]:
                del self._calls[caller]


async def _end(task: asyncio.Task[Any], context: Context, code: grpc.StatusCode, why: str) -> None:
    # Cancelling the task alone would leave the call open at the other side.
    try:
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await context.abort(code, why)
    finally:
        task.cancel()
