"""The calls that peers make, by the name in their certificate, so that calls of a revoked or quarantined peer end immediately."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc
import grpc.aio

from dtfm.protos.connection import DEFAULT_LEASE
from dtfm.protos.frame import MAX_FRAME_BYTES, STATE_CHUNK_BYTES
from dtfm.protos.identity.credentials import certified_name, shown_key, shown_name
from dtfm.protos.streams import requests_of
from dtfm.protos.token_bucket import TokenBucket

Context = grpc.aio.ServicerContext[bytes, bytes]
Request = TypeVar("Request")
Answer = TypeVar("Answer")
Answered = Callable[[Request, Context], Awaitable[Answer]]
Streamed = Callable[[Request, Context], AsyncIterator[bytes]]

REVOKED = "REVOKED: the coordinator has revoked this node's access"
QUARANTINED = "QUARANTINED: this node may take no part, until an operator forgives it"
MOST_CALLS = 16
"""Most calls of each method from one peer at a time. A node that recovers makes two calls to each donor, and more if it has lost
other donors."""
MOST_CALLS_OF_A_KEY = 128
"""The same of all names of one key: a machine with several devices has one."""
CALLS_PER_SECOND, CALLS_AT_ONCE = 500.0, 2000.0
"""What one peer may call over a while, and at once; who calls more often is answered later. A node that recovers makes a call for
each bucket, and one that measures its links a dozen."""
UNREAD = grpc.StatusCode.DEADLINE_EXCEEDED, "UNREAD: for a lease nobody has read what this call sends"
ABORT_SECONDS = 1.0
"""How long the refusal of a call in progress may take: it waits behind what the caller does not read."""


class Callers:
    """Wraps a server's methods. A peer's calls are answered at a bounded rate, and few of each method at a time.

    most: the number of calls of one name.
    of_key: the number of calls of all names of a key.
    longest: the bytes of a single request.
    called: the connections on which a member has called (context.peer()), also closed ones, until somebody takes them out.
    Calls of a revoked or quarantined peer are refused, and its calls in progress end. A stream that nobody reads for ``lease``
    seconds ends.
    """

    def __init__(self) -> None:
        self._revoked: frozenset[str] = frozenset()
        self._quarantined: frozenset[str] = frozenset()
        self._calls: defaultdict[str, dict[asyncio.Task[Any], tuple[Context, str]]] = defaultdict(dict)
        self._of_keys = Counter[tuple[str, str]]()  # the number of calls, by key and method
        self._ending: set[asyncio.Task[None]] = set()
        self._budgets: dict[str, TokenBucket] = {}
        self.called: set[str] = set()
        self.lease = DEFAULT_LEASE

    def answered(
        self,
        name: str,
        method: Answered[Request, Answer],
        most: int = MOST_CALLS,
        of_key: int = MOST_CALLS_OF_A_KEY,
        longest: int = MAX_FRAME_BYTES,
    ) -> Answered[Request, Answer]:
        async def call(request: Request, context: Context) -> Answer:
            try:
                await _check_size(request, name, longest, context)
                async with self._admitted(name, most, of_key, context):
                    return await method(_given(request, context), context)
            except grpc.aio.AbortError as refused:
                del request, context  # see _forgetful
                raise _forgetful(refused) from None

        return call

    def streamed(
        self,
        name: str,
        method: Streamed[Request],
        most: int = MOST_CALLS,
        of_key: int = MOST_CALLS_OF_A_KEY,
        longest: int = MAX_FRAME_BYTES,
    ) -> Streamed[Request]:
        async def call(request: Request, context: Context) -> AsyncIterator[bytes]:
            try:
                await _check_size(request, name, longest, context)
                async with self._admitted(name, most, of_key, context) as task:
                    loop = asyncio.get_running_loop()
                    async for piece in method(_given(request, context), context):
                        # A slow link takes longer for more.
                        patience = self.lease * max(1.0, len(piece) / STATE_CHUNK_BYTES)
                        unread = loop.call_later(patience, self._end, task, context, *UNREAD)
                        try:
                            yield piece
                        finally:
                            unread.cancel()
            except grpc.aio.AbortError as refused:
                del request, context  # see _forgetful
                raise _forgetful(refused) from None

        return call

    def revoke(self, names: Iterable[str]) -> None:
        """Ends calls of these names for good: they could call again over a connection that they opened before."""
        self._revoked |= frozenset(certified_name(name) for name in names)
        self._end_calls()

    def quarantine(self, names: Iterable[str]) -> None:
        """From now on these names may not call, and names of the earlier list may call again."""
        self._quarantined = frozenset(certified_name(name) for name in names)
        self._end_calls()

    def _refusal(self, caller: str) -> str:
        """Empty: the caller may call."""
        return REVOKED if caller in self._revoked else QUARANTINED if caller in self._quarantined else ""

    def _end_calls(self) -> None:
        for name in (self._revoked | self._quarantined) & self._calls.keys():
            for task, (context, _) in list(self._calls[name].items()):
                self._end(task, context, grpc.StatusCode.PERMISSION_DENIED, self._refusal(name))

    def _end(self, task: asyncio.Task[Any], context: Context, code: grpc.StatusCode, why: str) -> None:
        ending = asyncio.create_task(_end(task, context, code, why))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    @contextlib.asynccontextmanager
    async def _admitted(self, name: str, most: int, of_key: int, context: Context) -> AsyncIterator[asyncio.Task[Any]]:
        """Waits until the caller may make another call, and gives the call's task. Ends the call if the caller may not, or has
        ``most`` of this method running, or its key has ``of_key``."""
        shown = context.auth_context()
        caller, key, task = shown_name(shown), (shown_key(shown), name), asyncio.current_task()
        assert task is not None
        calls = self._calls[caller]
        running = sum(other == name for _, other in calls.values())
        calls[task] = context, name
        its = self._of_keys[key]
        self._of_keys[key] += 1
        self.called.add(context.peer())
        try:
            if refusal := self._refusal(caller):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)
            if running >= most:
                busy = f"BUSY: this peer has {most} calls of {name} running; wait for one to end"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
            if its >= of_key:
                busy = f"BUSY: the names of this key have {of_key} calls of {name} running; wait for one to end"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
            budget = self._budgets.setdefault(caller, TokenBucket(CALLS_PER_SECOND, CALLS_AT_ONCE))
            if pause := budget.draw(time.monotonic()):
                await asyncio.sleep(pause)
            yield task
        finally:
            del calls[task]
            if not calls:
                self._calls.pop(caller, None)
            self._of_keys[key] -= 1
            if not self._of_keys[key]:
                del self._of_keys[key]


async def _check_size(request: object, name: str, longest: int, context: Context) -> None:
    """Ends the call if its one request has more than ``longest`` bytes, before it waits for anything."""
    if isinstance(request, bytes) and len(request) > longest:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a request of {name} has at most {longest} bytes")


def _given(request: Request, context: Context) -> Request:
    """What a method gets: of a stream of requests another iterator (see requests_of)."""
    return requests_of(context) if isinstance(request, AsyncIterable) else request  # type: ignore[return-value]


def _forgetful(refused: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """The same exception without its traceback. gRPC keeps the exception with the call, and its traceback leads back to
    the call. So the bytes of a refused call would stay in memory until Python looks for such circles."""
    return refused.with_traceback(None)


async def _end(task: asyncio.Task[Any], context: Context, code: grpc.StatusCode, why: str) -> None:
    # Cancelling the task alone would leave the call open at the other side.
    try:
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await context.abort(code, why)
    finally:
        task.cancel()
