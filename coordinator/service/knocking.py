"""Dials a machine that asks for it, to tell whether others could: what a doctor cannot see from inside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dtfm.coordinator.core.validation import malformed
from dtfm.protos import control_pb2 as wire
from dtfm.protos.candidates import MOST_CANDIDATES, Address, read_candidate

TOKEN_BYTES = 16
KNOCK_SECONDS = 3.0
"""Most seconds for one candidate."""
MOST_AT_ONCE = 16
"""Candidates that are dialled at a time, for all callers together."""

_free = asyncio.Semaphore(MOST_AT_ONCE)


async def knock(candidates: Sequence[str], token: bytes, seen: Address | None) -> wire.KnockReply:
    """Dials the candidates that are at ``seen``, where the caller comes from: nobody can have others dialled. Raises Refused."""
    if len(candidates) > MOST_CANDIDATES:
        raise malformed("candidates", len(candidates), f"at most {MOST_CANDIDATES}")
    if len(token) != TOKEN_BYTES:
        raise malformed("token", len(token), f"{TOKEN_BYTES} bytes")
    outcomes = await asyncio.gather(*(_outcome(candidate, token, seen) for candidate in candidates))
    return wire.KnockReply(outcomes=outcomes, seen=str(seen or ""))


async def _outcome(candidate: str, token: bytes, seen: Address | None) -> wire.KnockReply.Outcome:
    try:
        address, port = read_candidate(candidate)
    except ValueError as error:
        raise malformed("candidates", candidate, str(error)) from None
    if address != seen:
        return wire.KnockReply.Outcome(candidate=candidate, elsewhere=True)
    async with _free:
        return wire.KnockReply.Outcome(candidate=candidate, problem=await _dial(str(address), port, token))


async def _dial(host: str, port: int, token: bytes) -> str:
    """Why it is not the caller that answers; empty if it is. What else was read is told nobody."""
    try:
        async with asyncio.timeout(KNOCK_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                answered = await reader.readexactly(TOKEN_BYTES)
            finally:
                writer.transport.abort()
    except TimeoutError:
        return f"no answer within {KNOCK_SECONDS:.0f} s"
    except asyncio.IncompleteReadError:
        return "another program answers there"
    except OSError as error:
        return (error.strerror or str(error))[:200]
    return "" if answered == token else "another program answers there"
