"""Reads a running coordinator's log and story, and makes requests to it."""

from __future__ import annotations

import getpass
import json
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from dtfm.coordinator.command.which_run import which_run
from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.connection import DEFAULT_LEASE
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.enrolment import Entry, Opened, refusal_in

if TYPE_CHECKING:  # the commands that read no log start faster without it
    from dtfm.coordinator.store.record import Record
    from dtfm.coordinator.view.so_far import SoFar

LOOKING = (Role.VIEWER, Role.OPERATOR)
DIRECTING = (Role.OPERATOR,)


class NobodyAnswers(ValueError):
    """No coordinator answers there."""


async def records(where: str, *, after: int = 0, follow: bool) -> AsyncIterator[Record]:
    """Yields the event log from sequence number ``after`` on, from the running coordinator that ``where`` leads to (see Entry).
    With ``follow``, goes on with new events until the coordinator ends. Raises ValueError."""
    from dtfm.coordinator.store.record import Record

    async for reply in _events(where, wire.EventsRequest(after=after, follow=follow)):
        yield Record.from_json(json.loads(reply.event_json))


async def told(where: str, *, follow: bool = True) -> AsyncIterator[SoFar]:
    """Yields the run so far, from the running coordinator, and once more after each later event. Raises ValueError."""
    from dtfm.coordinator.store.record import Record
    from dtfm.coordinator.view.so_far import SoFar
    from dtfm.coordinator.view.story_snapshot import story_format, story_from

    so_far, pieces = SoFar(), list[str]()
    async for reply in _events(where, wire.EventsRequest(follow=follow, story_format=story_format())):
        if reply.event_json:
            so_far.add(Record.from_json(json.loads(reply.event_json)))
        else:
            pieces.append(reply.story)
            if reply.story:
                continue  # the last has none
            so_far = story_from("".join(pieces).removesuffix("\n").split("\n")).now
        yield so_far


async def _events(where: str, request: wire.EventsRequest) -> AsyncIterator[wire.EventRecord]:
    opened = await open_way(where, LOOKING)
    async with opened.channel(DEFAULT_LEASE) as channel:
        stub = services.stub("Observer", channel)
        heard = False
        try:
            async for reply in stub.Events(request, metadata=opened.metadata):
                heard = True
                yield reply
        except grpc.aio.AioRpcError as error:
            if not (
                request.follow and heard and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            ):
                raise _explained(opened.address, error) from None


async def ask(where: str, call: str, *, roles: Sequence[Role] = DIRECTING, **fields: Any) -> Any:
    """Makes this call of the Observer service, with these fields of its request, in one of the ``roles``. Returns its reply.

    Raises ValueError when the coordinator does not answer, or refuses.
    """
    opened = await open_way(where, roles)
    async with opened.channel(DEFAULT_LEASE) as channel:
        stub = services.stub("Observer", channel)
        try:
            return await getattr(stub, call)(getattr(wire, f"{call}Request")(**fields), metadata=opened.metadata)
        except grpc.aio.AioRpcError as error:
            raise _explained(opened.address, error) from None


async def open_way(where: str, roles: Sequence[Role] = DIRECTING) -> Opened:
    """Opens the way to the coordinator in one of the ``roles``. Raises ValueError."""
    may_be_member = roles == LOOKING
    known = None if where else await which_run(roles, Path(), or_as_member=may_be_member)
    entry = Entry(where, roles, _drawn_name(), or_as_member=may_be_member, known=known)
    try:
        return await entry.open(DEFAULT_LEASE)
    except ConnectionError as error:
        raise _nobody_answers(f"{entry} ({error})") from None


def _drawn_name() -> str:
    """A new name for this user. The coordinator knows the user by it from now on, if it does not yet."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    user = re.sub(r"[^A-Za-z0-9]", "", user)[:32] or "user"
    return f"{user}-{secrets.token_hex(3)}"


def _nobody_answers(where: str) -> NobodyAnswers:
    return NobodyAnswers(f"no coordinator answers at {where}; give its HOST:PORT, or read its log by --store dtfm.db")


def _explained(address: str, error: grpc.aio.AioRpcError) -> ValueError:
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return _nobody_answers(address)
    return refusal_in(error) or ValueError(f"the coordinator at {address} refused: {error.details()}")
