"""The server for peers: tensor streams, probes, requests for state."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from dtfm.node.network.bandwidth_probe import LEAST_PIECE, MOST_BYTES, ProbeSender
from dtfm.node.state.disk import Disk
from dtfm.node.state.state_store import StateStore
from dtfm.node.transport.callers import Callers
from dtfm.node.transport.kept import Kept
from dtfm.node.transport.lent_connections import MOST_LENT, Holder
from dtfm.node.transport.receiver import Receiver
from dtfm.node.transport.warden import Warden
from dtfm.protos.connection import DEFAULT_LEASE, server_options
from dtfm.protos.frame import FrameError, FrameProblem, frames
from dtfm.protos.identity.credentials import (
    Identity,
    nobody,
    peer_credentials,
    shown_key,
    shown_name,
    shows_certificate,
)
from dtfm.protos.peer_pb2 import KeptRequest, StandbyRequest, StateRequest
from dtfm.protos.streams import NODE_METADATA, SEEN_METADATA, handlers, told
from dtfm.protos.token_bucket import TokenBucket

log = logging.getLogger(__name__)
# grpc logs every call that is cancelled when the server stops as an error.
logging.getLogger("grpc._cython.cygrpc").addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
)

Context = grpc.aio.ServicerContext[bytes, bytes]
Wanted = TypeVar("Wanted", bound=Message)
Found = TypeVar("Found")
#: Called with the seconds that a frame of state took; returns when the next one may be sent.
GiveWay = Callable[[float], Awaitable[None]]

MOST_KEPT_CALLS = 4
"""Most of one peer at a time that hand out a tensor for an audit, which each may take a piece's memory. An auditor makes two."""

MOST_PING_BYTES = 64
"""Of a ping and its echo."""
MOST_REQUEST_BYTES = 64 << 10
"""Of a request for state, or for a tensor: a standby's names its buckets."""
MOST_TENSOR_CALLS = 8
"""Of one peer at a time: one for each of two ranks, and others of earlier plans that are about to end."""
MOST_UPLOADS, MOST_UPLOADS_OF_A_KEY = 4, 8
"""At a time, of one peer and of all names of its key. A node has one probe under way to each other."""

STALE_BYTES_PER_SECOND, STALE_BYTES_AT_ONCE = float(16 << 20), float(256 << 20)
"""Frames of steps and generations that are over are dropped. After a change of plans there may be as many as were on their way;
who sends more is read more slowly."""
MOST_SLOWED = 4
"""Calls of one key at a time that are read more slowly. What they have sent waits in this node's memory."""


class PeerServer:
    """Serves peers. Accepts nobody until ``become`` has given it an identity, and no tensors until ``deliver_to`` a receiver.
    ``callers`` are told whose calls are not answered."""

    def __init__(
        self,
        store: StateStore,
        give_way: GiveWay,
        disk: Disk | None = None,
        holder: Holder | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.holder = holder or Holder()
        self._store = store
        self._disk = disk or Disk(Path(), "")  # never opened, so empty
        self._kept = kept or Kept()
        self._give_way = give_way
        self._receiver: Receiver | None = None
        self._identity = nobody()
        self._server = grpc.aio.server(options=server_options(self.holder.relay))
        self.callers = Callers()
        self._slowed = Counter[str]()  # the number of calls that wait, by key
        self._warden: Warden | None = None  # until it listens
        answered, streamed = self.callers.answered, self.callers.streamed
        methods = handlers(
            {
                "Tensors": answered("Tensors", self._tensors, MOST_TENSOR_CALLS),
                "Ping": answered("Ping", self._ping, longest=MOST_PING_BYTES),
                "Upload": streamed("Upload", self._upload, MOST_UPLOADS, MOST_UPLOADS_OF_A_KEY),
                "Download": streamed("Download", self._download),
                "State": streamed("State", self._state, longest=MOST_REQUEST_BYTES),
                "Standby": streamed("Standby", self._standby, longest=MOST_REQUEST_BYTES),
                "Kept": streamed("Kept", self._hand_out, MOST_KEPT_CALLS, longest=MOST_REQUEST_BYTES),
                "Lend": answered("Lend", self._lend, MOST_LENT, 4 * MOST_LENT),
                "Borrow": answered("Borrow", self._borrow, MOST_LENT, 4 * MOST_LENT),
            }
        )
        self._server.add_generic_rpc_handlers((methods,))

    async def start(self, listen: str) -> int:
        """Listens on HOST:PORT (port 0: a free one) and returns the port. Raises ValueError if it is in use."""
        try:
            port = self._server.add_secure_port(listen, peer_credentials(lambda: self._identity))
        except RuntimeError as error:
            raise ValueError(
                f"cannot listen on {listen}: {error}. Is the port in use? Give another with --listen HOST:PORT"
            ) from error
        await self._server.start()
        self._warden = Warden(port, self.callers.called)
        return port

    async def stop(self) -> None:
        if self._warden is not None:
            self._warden.close()
        await self._server.stop(grace=0)

    def become(self, identity: Identity, lease: float = DEFAULT_LEASE) -> None:
        """Accepts peers of this identity's run from now on, as this node. What nobody reads for ``lease`` seconds ends."""
        self._identity, self.callers.lease = identity, lease

    def deliver_to(self, receiver: Receiver | None) -> None:
        """Passes tensors to ``receiver`` from now on; None: refuses them."""
        self._receiver = receiver

    async def _tensors(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        source = told(context.invocation_metadata(), NODE_METADATA)
        if not shows_certificate(context.auth_context(), source):
            return f"CERTIFICATE: the caller's does not name {source[:64]!r}".encode()
        stale, key = TokenBucket(STALE_BYTES_PER_SECOND, STALE_BYTES_AT_ONCE), shown_key(context.auth_context())
        async for frame in requests:
            try:
                receiver = self._receiver
                if receiver is None:
                    raise FrameError(FrameProblem.UNKNOWN_GENERATION, "this node has no part in a plan")
                await receiver.readable(source, receiver.take(source, frame))
            except FrameError as refusal:
                if refusal.problem is FrameProblem.STALE:
                    log.debug("dropped a frame from %s: %s", source, refusal)
                    if pause := stale.draw(time.monotonic(), len(frame)):
                        if self._slowed[key] >= MOST_SLOWED:
                            return f"BUSY: {MOST_SLOWED} calls of this key's names send stale frames already".encode()
                        self._slowed[key] += 1
                        try:
                            await asyncio.sleep(pause)
                        finally:
                            self._slowed[key] -= 1
                            self._slowed += Counter()  # drops zeros
                    continue
                log.warning("refused a frame from %s: %s", source, refusal)
                return str(refusal).encode()
        return b""

    async def _ping(self, request: bytes, context: Context) -> bytes:
        context.set_trailing_metadata(((SEEN_METADATA, context.peer()),))
        return request

    async def _upload(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Reads on also where the caller does not read the answers: what it sends must not wait here."""
        answers = asyncio.Queue[bytes | None]()

        async def read() -> None:
            received = count = 0
            try:
                async for piece in requests:
                    received, count = received + len(piece), count + 1
                    if not piece or received > MOST_BYTES or count > MOST_BYTES // LEAST_PIECE:
                        raise ValueError(
                            f"a probe has at most {MOST_BYTES} bytes, in pieces of {LEAST_PIECE} and more on average"
                        )
                    answers.put_nowait(str(len(piece)).encode())
            finally:
                answers.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            await reading
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reading.cancel()

    async def _download(self, answers: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        probe = ProbeSender()

        async def read_answers() -> None:
            try:
                async for answer in answers:
                    probe.answered(answer)
            finally:
                probe.end()

        reading = asyncio.create_task(read_answers())
        try:
            async for piece in probe.pieces():
                yield piece
            if reading.done():
                reading.result()
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reading.cancel()

    async def _state(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        header, pieces = await _found(
            StateRequest,
            request,
            context,
            lambda wanted: (self._disk if wanted.from_snapshot else self._store).donate(wanted),
        )
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                for frame in frames(header, piece):
                    began = time.monotonic()
                    yield frame
                    await self._give_way(time.monotonic() - began)
                header = replace(header, offset=header.offset + len(piece))
        except LookupError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def _standby(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        subscription = await _found(
            StandbyRequest, request, context, lambda wanted: self._store.subscribe(wanted, loop)
        )
        try:
            async for frame in subscription.frames():
                began = time.monotonic()
                yield frame
                await self._give_way(time.monotonic() - began)
        except LookupError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            subscription.close()

    async def _hand_out(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """Nothing else is on its way then: all wait for the commit, so that no other stream has to be given way."""
        caller = shown_name(context.auth_context())
        header, encoded = await _found(KeptRequest, request, context, partial(self._kept.find, caller))
        for frame in frames(header, encoded):
            yield frame

    async def _lend(self, requests: AsyncIterator[bytes], context: Context) -> None:
        node = await self._member(context)
        await self.holder.serve_lender(node, shown_key(context.auth_context()), requests, context)

    async def _borrow(self, requests: AsyncIterator[bytes], context: Context) -> None:
        await self._member(context)
        await self.holder.serve_borrower(shown_key(context.auth_context()), requests, context)

    async def _member(self, context: Context) -> str:
        """The caller's name, which its certificate shows."""
        name = told(context.invocation_metadata(), NODE_METADATA)
        if not shows_certificate(context.auth_context(), name):
            problem = f"CERTIFICATE: the caller's does not name {name[:64]!r}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
        return name


async def _found(kind: type[Wanted], request: bytes, context: Context, find: Callable[[Wanted], Found]) -> Found:
    """What ``find`` returns, in a thread, for the request. Ends the call if it is malformed, or if nothing is found."""
    try:
        return await asyncio.to_thread(find, kind.FromString(request))
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"MALFORMED: not a {kind.DESCRIPTOR.name}")
    except LookupError as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
