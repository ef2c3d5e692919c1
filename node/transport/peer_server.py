"""What a node answers its peers: tensor streams, probes, requests for state."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from dtfm.node.host.bandwidth_probe import MOST_BYTES, Burst
from dtfm.node.state.disk import Disk
from dtfm.node.state.state_store import Holding
from dtfm.node.transport.receiver import Inbox
from dtfm.protos.connection import server_options
from dtfm.protos.credentials import Identity, nobody, peer_credentials, shown_name, shows_certificate
from dtfm.protos.frame import FrameError, FrameProblem, frames
from dtfm.protos.peer_pb2 import FollowRequest, StateRequest
from dtfm.protos.streams import NODE_METADATA, peer_handlers

log = logging.getLogger(__name__)
# grpc tells of every call that is cancelled when the server stops as of an error.
logging.getLogger("grpc._cython.cygrpc").addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
)

Context = grpc.aio.ServicerContext[bytes, bytes]
#: Called with the seconds that a piece of state took: returns when the next one may go.
GiveWay = Callable[[float], Awaitable[None]]


MOST_CALLS = 16
"""So many requests for state, as many to follow (each takes the memory of a bucket), and as many bursts of each kind one peer may
have here at a time. Who recovers asks each donor for two at once, and, where others are lost, for those that it asked of them."""


class PeerServer:
    """Serves peers. Until ``become`` says who this node is nobody gets through, and until ``admit_to`` names an inbox no
    tensor."""

    def __init__(self, holding: Holding, give_way: GiveWay, disk: Disk | None = None) -> None:
        self._holding = holding
        self._disk = disk or Disk(Path(), "")  # never opened: nothing is there
        self._give_way = give_way
        self._inbox: Inbox | None = None
        self._identity = nobody(datetime.now(UTC))
        self._calls: Counter[tuple[str, str]] = Counter()
        self._server = grpc.aio.server(options=server_options())
        handlers = peer_handlers(self._tensors, self._ping, self._upload, self._download, self._state, self._follow)
        self._server.add_generic_rpc_handlers((handlers,))

    async def start(self, listen: str) -> int:
        """Listens on HOST:PORT (port 0 takes a free one) and returns the port. Raises ValueError when it is taken."""
        try:
            port = self._server.add_secure_port(listen, peer_credentials(lambda: self._identity))
        except RuntimeError as error:
            raise ValueError(
                f"cannot listen on {listen}: {error}. Is the port in use? Give another with --listen HOST:PORT"
            ) from error
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(grace=0)

    def become(self, identity: Identity) -> None:
        """From now on peers of that run get through, and meet that node."""
        self._identity = identity

    def admit_to(self, inbox: Inbox | None) -> None:
        self._inbox = inbox

    async def _tensors(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        source = _claimed(context)
        if not shows_certificate(context.auth_context(), source):
            return f"CERTIFICATE: the caller's does not name {source[:64]!r}".encode()
        async for frame in requests:
            try:
                inbox = self._inbox
                if inbox is None:
                    raise FrameError(FrameProblem.UNKNOWN_GENERATION, "this node has no part in a plan")
                await inbox.readable(source, inbox.take(source, frame))
            except FrameError as refusal:
                if refusal.problem is FrameProblem.STALE:
                    log.debug("dropped a frame from %s: %s", source, refusal)
                    continue
                log.warning("refused a frame from %s: %s", source, refusal)
                return str(refusal).encode()
        return b""

    async def _ping(self, request: bytes, context: Context) -> bytes:
        return request

    async def _upload(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async with self._place("Upload", context):
            received = 0
            async for piece in requests:
                received += len(piece)
                if not piece or received > MOST_BYTES:
                    problem = f"a burst has at most {MOST_BYTES} bytes, and no empty pieces"
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
                yield str(len(piece)).encode()

    async def _download(self, answers: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        burst = Burst()

        async def hear() -> None:
            try:
                async for answer in answers:
                    burst.answered(answer)
            finally:
                burst.end()

        async with self._place("Download", context):
            hearing = asyncio.create_task(hear())
            try:
                async for piece in burst.pieces():
                    yield piece
                if hearing.done():
                    hearing.result()
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            finally:
                hearing.cancel()

    async def _state(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        async with self._place("State", context):
            try:
                wanted = StateRequest.FromString(request)
                source = self._disk if wanted.backup else self._holding
                header, state = await asyncio.to_thread(source.donate, wanted)
            except DecodeError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED: no StateRequest")
            except LookupError as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            for frame in frames(header, state):
                began = time.monotonic()
                yield frame
                await self._give_way(time.monotonic() - began)

    async def _follow(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        async with self._place("Follow", context):
            try:
                wanted, loop = FollowRequest.FromString(request), asyncio.get_running_loop()
                follower = await asyncio.to_thread(self._holding.follow, wanted.buckets, loop)
            except DecodeError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED: no FollowRequest")
            except LookupError as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            try:
                async for frame in follower.frames():
                    began = time.monotonic()
                    yield frame
                    await self._give_way(time.monotonic() - began)
            except LookupError as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            finally:
                loop.run_in_executor(None, follower.close)  # it may have to wait while a step is applied

    @asynccontextmanager
    async def _place(self, method: str, context: Context) -> AsyncIterator[None]:
        """One of the caller's MOST_CALLS. Ends the call where all are taken."""
        caller = shown_name(context.auth_context()), method
        if self._calls[caller] >= MOST_CALLS:
            busy = f"BUSY: {MOST_CALLS} calls of {method} run for this peer already; wait for one to end"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
        self._calls[caller] += 1
        try:
            yield
        finally:
            self._calls[caller] -= 1
            if not self._calls[caller]:
                del self._calls[caller]


def _claimed(context: Context) -> str:
    """The calling node's name, as it says."""
    name = next((value for key, value in context.invocation_metadata() or () if key == NODE_METADATA), "")
    return name if isinstance(name, str) else name.decode("latin-1")
