"""Lent connections: how others reach a node that cannot be dialled.

The node dials out to another one, the holder, and lends it the connection: a call of gRPC that carries bytes both ways, on a TCP
connection of its own. The holder keeps it until somebody wants to reach the node: the holder itself (dial-back), or another
member that borrows it (then the holder is a relay). What travels over it is that member's ordinary connection to the node, with
TLS from end to end, so that a relay sees ciphertext alone. A connection is used once; the node lends the next one when one is
taken.

Who lends and who borrows shows its certificate, and only nodes that have lent something can be reached: a holder dials nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack

import grpc
import grpc.aio

from dtfm.node.transport.backlogs import Backlogs
from dtfm.node.transport.pipes import PIECE, Pipe, call_pipe, join, read_ahead, served_pipe, socket_pipe
from dtfm.protos.connection import read_address
from dtfm.protos.streams import LENDER_METADATA, NODE_METADATA, method, told

log = logging.getLogger(__name__)

SPARE = 2
"""Connections that wait at a holder to be taken, so that a caller need not wait for a round trip."""
MOST_LENT = 64
"""Most connections that one node lends to one holder, or borrows from it, waiting or in use. A peer that reaches it needs about
four: for tensors, for state, and two while it measures the link."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 2.0
"""Between two attempts to lend to a holder that does not answer."""
BORROWING_SECONDS = 2.0
"""How long a relay waits for the next connection that the lender sends."""

Context = grpc.aio.ServicerContext[bytes, bytes]


class NotLent(Exception):
    """There is no connection to the node, for the reason in the text."""


class Holder:
    """What others have lent to this node. With ``relay`` other members may borrow it."""

    def __init__(self, relay: bool = False) -> None:
        self.relay = relay
        self._waiting: dict[str, deque[Pipe]] = {}
        self._arrived = asyncio.Condition()
        self._backlogs = Backlogs()

    async def serve_lender(self, node: str, key: str, requests: AsyncIterator[bytes], context: Context) -> None:
        """Holds a connection that ``node``, of ``key``, lends, until it is used up, or speaks before anybody has taken it."""
        pipe, closed = served_pipe(requests, context)
        lent, spoken = read_ahead(self._backlogs.watched(pipe, key))
        waiting = self._waiting.setdefault(node, deque())
        waiting.append(lent)
        spoken.add_done_callback(lambda _: lent.close() if lent in waiting else None)
        if len(waiting) > SPARE:  # the oldest may be of a process that has vanished without a word
            waiting.popleft().close()
        async with self._arrived:
            self._arrived.notify_all()
        try:
            await closed.wait()
        finally:
            spoken.cancel()
            lent.close()
            with contextlib.suppress(ValueError):
                waiting.remove(lent)
            if not waiting and self._waiting.get(node) is waiting:
                del self._waiting[node]

    async def serve_borrower(self, key: str, requests: AsyncIterator[bytes], context: Context) -> None:
        """Joins the bytes of the caller, of this ``key``, with a connection of the lender that its metadata name."""
        if not self.relay:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "NOT_A_RELAY: this node is none; see join --relay")
        lender = told(context.invocation_metadata(), LENDER_METADATA)
        pipe, closed = served_pipe(requests, context)
        borrowed = self._backlogs.watched(pipe, key)
        try:
            lent = await self.take(lender, BORROWING_SECONDS)
        except NotLent as why:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"NOT_LENT: {why}")
        joined = asyncio.create_task(join(borrowed, lent))
        joined.add_done_callback(lambda _: closed.set())
        try:
            await closed.wait()
        finally:
            joined.cancel()

    async def take(self, lender: str, patience: float) -> Pipe:
        """The newest connection that the node has lent. Waits up to ``patience`` seconds for one. Raises NotLent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience), self._arrived:
                await self._arrived.wait_for(lambda: self._waiting.get(lender))
                return self._waiting[lender].pop()
        raise NotLent(f"{lender[:64]} has lent no connection for {patience:.0f} s")


class Lender:
    """Lends connections to the port on which this node itself listens. ``dial`` opens a channel to a holder, with a TCP
    connection of its own."""

    def __init__(self, node: str, dial: Callable[[str], grpc.aio.Channel]) -> None:
        self._node = node
        self._dial = dial
        self._listening = ("127.0.0.1", 0)
        self._keeping: dict[str, list[asyncio.Task[None]]] = {}
        self._using: set[asyncio.Task[None]] = set()

    def listens_at(self, address: str) -> None:
        """Where this node listens: HOST:PORT, as reached from this machine."""
        self._listening = read_address(address)

    def lend_to(self, holders: Iterable[str]) -> None:
        """Lends to these nodes from now on, and to no other. Connections in use stay."""
        wanted = set(holders)
        for gone in self._keeping.keys() - wanted:
            for task in self._keeping.pop(gone):
                task.cancel()
        for holder in wanted - self._keeping.keys():
            places = asyncio.Semaphore(MOST_LENT)
            self._keeping[holder] = [asyncio.create_task(self._lend(holder, places)) for _ in range(SPARE)]

    async def close(self) -> None:
        tasks = [*self._using, *(task for tasks in self._keeping.values() for task in tasks)]
        self.lend_to(())
        for task in self._using:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _lend(self, holder: str, places: asyncio.Semaphore) -> None:
        """Lends one connection after the other: the next one when one is taken."""
        this = asyncio.current_task()
        assert this is not None
        pause = FIRST_PAUSE_SECONDS
        while not this.cancelling():  # gRPC's read swallows a cancellation that meets the end of the call
            async with AsyncExitStack() as stack:
                await places.acquire()
                stack.callback(places.release)
                channel = self._dial(holder)
                stack.push_async_callback(channel.close)
                pipe = call_pipe(method(channel, "Lend")(metadata=((NODE_METADATA, self._node),)))
                stack.callback(pipe.close)
                try:
                    first = await pipe.read()  # the side that dials speaks first, in TLS
                except grpc.aio.AioRpcError as error:
                    first = b""
                    if pause == FIRST_PAUSE_SECONDS:  # once per outage
                        why = f"{error.code().name}: {error.details()}"
                        log.info("cannot lend a connection to %s: %s", holder, why)
                if first:
                    use = asyncio.create_task(self._use(pipe, first, stack.pop_all()))
                    self._using.add(use)
                    use.add_done_callback(self._using.discard)
                    pause = FIRST_PAUSE_SECONDS
                    continue
            await asyncio.sleep(0 if this.cancelling() else pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _use(self, pipe: Pipe, first: bytes, stack: AsyncExitStack) -> None:
        """Joins a connection that was taken with this node's own port."""
        async with stack:
            try:
                own = socket_pipe(*await asyncio.open_connection(*self._listening, limit=PIECE))
                await own.write(first)
            except OSError as error:
                log.warning("a lent connection does not reach this node's own port: %s", error)
                return
            await join(pipe, own)


def borrow(channel: grpc.aio.Channel, node: str, lender: str) -> Pipe:
    """A connection to ``lender`` that the relay at the other end of ``channel`` holds, which is closed with it. ``node``: who
    asks. A refusal shows when it is read."""
    return call_pipe(method(channel, "Borrow")(metadata=((NODE_METADATA, node), (LENDER_METADATA, lender))), channel)
