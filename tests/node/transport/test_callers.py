"""A revoked node's calls end, whatever it does: `transport/callers.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from dtfm.node.transport import callers
from dtfm.node.transport.callers import Callers, Context
from dtfm.protos.identity.credentials import certified_name


class Blocked:
    """The context of a call by "a", which reads nothing, so that no refusal reaches it."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": [certified_name("a").encode()]}

    def peer(self) -> str:
        return "ipv4:192.0.2.1:4711"

    async def abort(self, *_: Any) -> None:
        await asyncio.Event().wait()


async def test_a_stream_that_nobody_reads_for_a_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "ABORT_SECONDS", 0.05)
    closed, stuck = asyncio.Event(), asyncio.Event()

    async def method(_request: bytes, _context: Context) -> AsyncIterator[bytes]:
        try:
            for _ in range(3):
                yield b"piece"
        finally:
            closed.set()

    async def read(last: int) -> None:
        """As gRPC does for a caller that reads ``last`` pieces."""
        left = last
        async for _ in mine.streamed("State", method)(b"", cast(Context, Blocked())):
            left -= 1
            if not left:
                await stuck.wait()

    mine = Callers()
    mine.lease = 0.05
    await read(4)
    await asyncio.sleep(3 * mine.lease)  # nothing is waited for any more
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(read(2))
    await closed.wait()


async def test_a_call_ends_even_if_its_caller_does_not_read_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "ABORT_SECONDS", 0.05)
    begun = asyncio.Event()

    async def method(_request: bytes, _context: Context) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b""

    mine = Callers()
    call = asyncio.ensure_future(mine.answered("Ping", method)(b"", cast(Context, Blocked())))
    await begun.wait()
    mine.revoke(["a"])
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(call), 5)
