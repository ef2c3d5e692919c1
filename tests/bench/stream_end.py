"""One end of the streams that stream.py measures: ``python -m tests.bench.stream_end ADDRESS``.

The first line that it reads is its identity (``identity_line``). Then it prints on which ports of ADDRESS it listens, reads
orders as JSON lines, and answers each with one line:
``{"send": way, "to": address, "tensors": n}``: sends n tensors to another end; the answer is the seconds until all have arrived;
``{}``: the CPU seconds that this process has used so far.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from dtfm.kernels.memory import MEMORY
from dtfm.node.host.device import keep_freed_memory
from dtfm.protos.connection import DEFAULT_LEASE, channel_options, open_channel, server_options
from dtfm.protos.frame import Assembly, Header, Kind, frames, parse
from dtfm.protos.identity.credentials import Identity, certified_name, peer_credentials, to_peer
from dtfm.protos.streams import handlers, method

TENSOR_BYTES = 64 << 20
WAYS = ("ours", "socket", "ours, mTLS", "socket, mTLS")
RECEIVER = "receiver"
"""The name in the receiving end's certificate."""
_ACKNOWLEDGED = b"!"

Context = grpc.aio.ServicerContext[bytes, bytes]


class Receiver:
    """Takes tensors on both ports."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._arrived = asyncio.Semaphore(0)

    async def start(self, address: str) -> dict[str, int]:
        """Returns the ports, by way."""
        self._server = grpc.aio.server(options=server_options())
        self._server.add_generic_rpc_handlers((handlers({"Tensors": self._tensors, "Ping": self._ping}),))
        ours = self._server.add_insecure_port(f"{address}:0")
        ours_secure = self._server.add_secure_port(f"{address}:0", peer_credentials(lambda: self._identity))
        await self._server.start()
        plain, secure = (socket.create_server((address, 0)) for _ in range(2))
        context = ssl_context(self._identity, ssl.Purpose.CLIENT_AUTH)
        threading.Thread(target=_take, args=(plain, None), daemon=True).start()
        threading.Thread(target=_take, args=(secure, context), daemon=True).start()
        ports = (ours, plain.getsockname()[1], ours_secure, secure.getsockname()[1])
        return dict(zip(WAYS, ports, strict=True))

    async def _tensors(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        assembly: Assembly | None = None
        async for frame in requests:
            header, payload = parse(frame)
            assembly = assembly or Assembly(header, MEMORY.take(header.total).data)
            if assembly.take(header, payload):
                assembly = None
                self._arrived.release()
        return b""

    async def _ping(self, request: bytes, context: Context) -> bytes:
        """Answers when the requested number of tensors has arrived since the last answer."""
        for _ in range(int(request)):
            await self._arrived.acquire()
        return b""


def identity_line(identity: Identity) -> str:
    return json.dumps({name: pem.decode() for name, pem in asdict(identity).items()}) + "\n"


def ssl_context(identity: Identity, purpose: ssl.Purpose) -> ssl.SSLContext:
    """Presents ``identity``'s certificate, and requires one of the same authority from the other side."""
    context = ssl.create_default_context(purpose, cadata=identity.authority.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "identity.pem"
        file.write_bytes(identity.key + identity.certificate)
        context.load_cert_chain(file)
    return context


def _take(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    while True:
        connection, _ = listener.accept()
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        threading.Thread(target=_swallow, args=(connection,), daemon=True).start()


def _swallow(connection: socket.socket) -> None:
    """Acknowledges each tensor. All are received into the same memory, which is the cheapest way."""
    whole = memoryview(bytearray(TENSOR_BYTES))
    with connection:
        while True:
            filled = 0
            while filled < TENSOR_BYTES:
                got = connection.recv_into(whole[filled:])
                if not got:
                    return
                filled += got
            connection.sendall(_ACKNOWLEDGED)


class Sender:
    """Keeps one stream of each way open to each address it sends to."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._tensor = np.random.default_rng(0).integers(0, 256, TENSOR_BYTES, np.uint8).data
        self._header = Header(Kind.ACTIVATION, 0, 1, 1, 1, 0, 0, TENSOR_BYTES // 4, TENSOR_BYTES)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._streams: dict[str, Any] = {}
        self._sockets: dict[str, socket.socket] = {}

    def use(self, to: str, channel: grpc.aio.Channel) -> None:
        """Reaches ``to`` over this channel."""
        if to not in self._channels:
            self._channels[to] = channel
            self._streams[to] = method(channel, "Tensors")()

    async def send(self, way: str, to: str, tensors: int) -> None:
        secure = way.endswith("mTLS")
        await (self._ours if way.startswith("ours") else self._socket)(secure, to, tensors)

    async def _ours(self, secure: bool, to: str, tensors: int) -> None:
        if to not in self._channels:
            self._channels[to] = (
                open_channel(to, to_peer(self._identity, RECEIVER))
                if secure
                else grpc.aio.insecure_channel(to, options=channel_options(DEFAULT_LEASE))
            )
            self._streams[to] = method(self._channels[to], "Tensors")()
        arrived = asyncio.ensure_future(method(self._channels[to], "Ping")(str(tensors).encode()))
        for _ in range(tensors):
            for frame in frames(self._header, self._tensor):
                await self._streams[to].write(frame)
        await arrived

    async def _socket(self, secure: bool, to: str, tensors: int) -> None:
        if to not in self._sockets:
            host, _, port = to.rpartition(":")
            self._sockets[to] = socket.create_connection((host, int(port)))
            if secure:
                context = ssl_context(self._identity, ssl.Purpose.SERVER_AUTH)
                self._sockets[to] = context.wrap_socket(self._sockets[to], server_hostname=certified_name(RECEIVER))

        def send() -> None:
            for _ in range(tensors):
                self._sockets[to].sendall(self._tensor)
            for _ in range(tensors):
                self._sockets[to].recv(1)

        await asyncio.to_thread(send)


async def main() -> None:
    keep_freed_memory()
    identity = Identity(**{name: pem.encode() for name, pem in json.loads(sys.stdin.readline()).items()})
    print(json.dumps(await Receiver(identity).start(sys.argv[1])), flush=True)
    sender = Sender(identity)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if "send" in order:
            began = time.perf_counter()
            await sender.send(order["send"], order["to"], order["tensors"])
            answer = {"seconds": time.perf_counter() - began}
        else:
            answer = {"seconds": time.process_time()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
