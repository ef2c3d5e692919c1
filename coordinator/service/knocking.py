"""Dials a machine that asks for it, to tell whether others could: what a doctor cannot see from inside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from dtfm.coordinator.core.refusal import Refused, malformed
from dtfm.coordinator.service.addresses import is_own
from dtfm.protos import control_pb2 as wire
from dtfm.protos.candidates import MOST_CANDIDATES, Address, read_candidate
from dtfm.protos.knock import ANOTHER, TOKEN_BYTES, dial

MOST_AT_ONCE = 8
"""Calls that are answered at a time, for all callers together. Each has at most MOST_CANDIDATES connections open."""

NOT_REACHED = "not reached"

_busy: set[str] = set()
"""The names for which a call is being answered."""


async def knock(name: str, candidates: Sequence[str], token: bytes, seen: Address | None) -> wire.KnockReply:
    """Dials the candidates that are at ``seen``, where the caller comes from: nobody can have others dialled, and not this
    machine either, from which a proxy's callers seem to come. Equal ones are dialled once. ``name``: the caller's, who has one
    such call at a time. Raises Refused before anything is dialled."""
    if len(token) != TOKEN_BYTES:
        raise malformed("token", len(token), f"{TOKEN_BYTES} bytes")
    wanted = _read(candidates)
    caller = None if seen is None or is_own(seen) else seen
    with _place(name):
        async with asyncio.TaskGroup() as group:
            dials = {
                (address, port): group.create_task(_dial(str(address), port, token))
                for address, port in wanted
                if address == caller
            }
    outcomes = [
        wire.KnockReply.Outcome(candidate=text, problem=dials[which].result())
        if which in dials
        else wire.KnockReply.Outcome(candidate=text, elsewhere=True)
        for which, text in wanted.items()
    ]
    return wire.KnockReply(outcomes=outcomes, seen=str(seen or ""))


def _read(candidates: Sequence[str]) -> dict[tuple[Address, int], str]:
    """As the caller writes them, by address and port. Raises Refused."""
    if len(candidates) > MOST_CANDIDATES:
        raise malformed("candidates", len(candidates), f"at most {MOST_CANDIDATES}")
    wanted: dict[tuple[Address, int], str] = {}
    for candidate in candidates:
        try:
            wanted.setdefault(read_candidate(candidate), candidate)
        except ValueError as error:
            raise malformed("candidates", candidate, str(error)) from None
    return wanted


@contextlib.contextmanager
def _place(name: str) -> Iterator[None]:
    """One of few. Nobody waits for one, as what waits costs memory too. Raises Refused."""
    if name in _busy:
        raise Refused(wire.BUSY, f"{name} is being dialled already; ask again when that is answered")
    if len(_busy) >= MOST_AT_ONCE:
        raise Refused(wire.BUSY, f"{len(_busy)} others are being dialled, as many as can be; ask again in some seconds")
    _busy.add(name)
    try:
        yield
    finally:
        _busy.discard(name)


async def _dial(host: str, port: int, token: bytes) -> str:
    """Empty if it is the caller that answers, else one of two sentences: no more is told, or it would be a port scan."""
    problem = await dial(host, port, token)
    return problem if problem in ("", ANOTHER) else NOT_REACHED
