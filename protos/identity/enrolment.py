"""The way into a run: from an invitation, an address, or what is remembered, to a connection on which calls can be made."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from dtfm.file_lock import locked
from dtfm.protos import DEFAULT_ADDRESS, PROTOCOL_VERSION, services
from dtfm.protos.connection import open_channel, read_address
from dtfm.protos.control_pb2 import EnrolReply, EnrolRequest, InviteRequest, RefusalReason
from dtfm.protos.identity.access import MOST_RUN_CHARACTERS, Access, Role, enrolment_lock, keep, kept, other_key
from dtfm.protos.identity.credentials import (
    fetch_authority,
    in_time,
    make_key,
    pin_of,
    public_key,
    shown_certificate,
    to_coordinator,
)
from dtfm.protos.identity.invitation import MOST_ADDRESSES, MOST_CHARACTERS, Invitation, invitation_in, read_invitation
from dtfm.protos.identity.proof import ClockError, Metadata, proof

OWN_INVITATION_SECONDS = 600.0
"""How long an invitation is good for that an operator's machine makes for a node of its own."""


class NotAdmitted(ValueError):
    """``reason``: the name of a RefusalReason, or of one of this module's own: no later try will go otherwise."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(f"{reason}: {sentence}")
        self.reason = reason
        self.sentence = sentence


def refusal_in(error: grpc.aio.AioRpcError) -> NotAdmitted | None:
    """The coordinator's named refusal of a call; None if it failed otherwise."""
    if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return None
    reason, _, sentence = (error.details() or "").partition(": ")
    if reason not in set(RefusalReason.keys()):
        return None
    return NotAdmitted(reason, sentence)


@dataclass(frozen=True, slots=True)
class Opened:
    """Where the coordinator answers, its authority's certificate, and what this user may do there."""

    address: str
    authority: bytes
    access: Access

    @property
    def metadata(self) -> Metadata:
        """The metadata to send with a call. It holds for minutes, so each call gets its own."""
        return proof(self.access.key, self.access.name, self.access.pin)

    def channel(self, lease: float) -> grpc.aio.Channel:
        credentials, options = to_coordinator(self.authority)
        # Of gRPC's own pings, for which those of the channel wait: else a coordinator that is stopped is noticed after a minute.
        ping = ("grpc.http2.ping_timeout_ms", int(lease * 1000))
        return open_channel(self.address, (credentials, (*options, ping)), lease)


class Entry:
    """The way to a coordinator. ``open`` may be called any number of times."""

    def __init__(
        self,
        where: str,
        roles: Sequence[Role],
        name: str,
        *,
        or_as_member: bool = False,
        known: Access | None = None,
    ) -> None:
        """``where``: an invitation, a file with one, HOST:PORT, or empty for what was used last. ``roles``: one of them is
        needed. ``name``: under which to be enrolled. ``or_as_member``: where this user has none of these roles, the key of a
        node of this user's will do. ``known``: who to be, and where, if ``where`` is empty. Raises ValueError."""
        self._place = _read_place(where)
        self._roles = tuple(roles)
        self._or_as = (Role.NODE,) * or_as_member
        self._name = name
        self._used = known  # by the last `open`
        self._moved_to = ""  # HOST:PORT

    def __str__(self) -> str:
        """Where it leads, without secrets."""
        try:
            return " or ".join(self.leads_to[0])
        except ValueError:
            return "the coordinator that was used last"

    @property
    def leads_to(self) -> tuple[tuple[str, ...], bytes | None]:
        """Where the coordinator may be (HOST:PORT), and its authority's pin if that is known before. Raises ValueError if what is
        remembered cannot be read."""
        if isinstance(self._place, Invitation):
            before = self._used or self._known(self._place.pin)  # it may have moved since the invitation was made
            return self._all(*self._place.addresses, *(before.addresses if before else ())), self._place.pin
        # Once this process has been let in, nobody else at the address can lead it elsewhere.
        last = self._used or (None if self._place else self._newest())
        if last is not None:
            return self._all(self._place, *last.addresses), last.pin
        return (self._place or DEFAULT_ADDRESS,), None

    def _all(self, *addresses: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, [self._moved_to, *addresses])))

    def has_moved(self, address: str) -> None:
        """From now on the coordinator, whose pin is known, is looked for at this HOST:PORT, too. The address is remembered once
        it has let this user in there."""
        self._moved_to = address

    def _remembered(self, opened: Opened) -> Opened:
        """Keeps the address where the coordinator answered."""
        before = opened.access.addresses
        if opened.address in before:
            return opened
        access = replace(opened.access, addresses=(opened.address, *before)[:MOST_ADDRESSES])
        keep(access)
        self._used = access
        return replace(opened, access=access)

    async def answering(self, timeout: float) -> tuple[str, bytes, bytes]:
        """Returns HOST:PORT of the coordinator that answers, its authority's certificate (PEM), and the pin of that. Raises
        ConnectionError if none answers, and NotAdmitted if another does than the one that is wanted, or one of another time."""
        addresses, pin = self.leads_to
        try:
            if pin is not None:
                return *await fetch_authority(addresses, pin, timeout), pin
            authority = in_time(await shown_certificate(addresses[0], timeout))
        except PermissionError as error:
            raise NotAdmitted("WRONG_AUTHORITY", str(error)) from None
        except ClockError as error:
            raise NotAdmitted("WRONG_CLOCK", str(error)) from None
        return addresses[0], authority, pin_of(authority)

    async def open(self, timeout: float) -> Opened:
        """Raises ConnectionError if the coordinator does not answer, and NotAdmitted if it, or this side, refuses."""
        return self._remembered(await self._open(timeout))

    async def _open(self, timeout: float) -> Opened:
        address, authority, pin = await self.answering(timeout)
        if isinstance(self._place, Invitation):
            return await self._by_invitation(self._place, address, authority, timeout)
        if (access := self._known(pin)) is not None:
            if self._used is None:
                keep(access)  # it is the newest now
            self._used = access
            return Opened(address, authority, access)
        if Role.NODE in self._roles and (operators := _enrolled([Role.OPERATOR], pin)):
            own = await _invite(Opened(address, authority, operators[0]), self._name, timeout)
            addresses = tuple(dict.fromkeys([address, *own.addresses]))[:MOST_ADDRESSES]
            return await self._by_invitation(replace(own, addresses=addresses, pin=pin), address, authority, timeout)
        if (key := self._key_here(pin)) is not None:
            fresh = Access((address,), pin, self._name, Role.NODE, key)
            self._used = await self._enrol(Opened(address, authority, fresh), None, timeout)
            return Opened(address, authority, self._used)
        raise self._needed(address)

    async def look(self, timeout: float) -> EnrolReply:
        """Asks what `open` would be answered, what the run trains, and what its members have prepared. Nobody is enrolled, and no
        invitation is used up. Raises ConnectionError and NotAdmitted as `open` does."""
        address, authority, pin = await self.answering(timeout)
        invitation = self._place if isinstance(self._place, Invitation) else None
        if invitation is not None:
            known = kept(self._roles, pin, self._name)
        else:  # who runs the coordinator lets own nodes in
            known = _enrolled(self._roles, pin, self._name) or _enrolled([*self._roles, Role.OPERATOR], pin)
            if not known:
                raise self._needed(address)
        access = known[0] if known else Access((address,), pin, self._name, self._roles[0], make_key())
        roles = (Role.OPERATOR,) if access.role is Role.OPERATOR else self._roles
        request = _enrol_request(access, invitation, roles)
        request.dry = True
        reply: EnrolReply = await _call(Opened(address, authority, access), "Coordinator", "Enrol", request, timeout)
        return reply

    def remember(self, access: Access) -> None:
        """Keeps the changed ``access`` in place of the one that `open` has returned. Raises ValueError."""
        self._used = access
        keep(access)

    def _needed(self, address: str) -> NotAdmitted:
        return NotAdmitted(
            "INVITATION_NEEDED",
            f"the coordinator at {address} knows no key of this user's for the role {' or '.join(self._roles)}; ask for an "
            f"invitation (dtfm-coordinator invite --role {self._roles[0]}), and give it once in place of the address",
        )

    async def _by_invitation(self, invitation: Invitation, address: str, authority: bytes, timeout: float) -> Opened:
        if self._used is None:
            async with locked(enrolment_lock(invitation.pin)):
                self._used = await self._first_enrolled(address, authority, invitation, timeout)
        return Opened(address, authority, self._used)

    async def _first_enrolled(self, address: str, authority: bytes, invitation: Invitation, timeout: float) -> Access:
        key = self._key_here(invitation.pin) or make_key()
        fresh = Access(invitation.addresses, invitation.pin, self._name, self._roles[0], key)
        before = kept(self._roles, invitation.pin, self._name if Role.NODE in self._roles else "")
        try:
            return await self._enrol(Opened(address, authority, (*before, fresh)[0]), invitation, timeout)
        except NotAdmitted as refused:
            if members := _enrolled(self._or_as, invitation.pin):
                return members[0]  # it was pasted from the line that made this machine a member
            if Role.NODE in self._roles or not before or refused.reason != "NAME_TAKEN":
                raise
            # What was remembered is revoked. People's names are drawn, so another will do.
            return await self._enrol(Opened(address, authority, fresh), invitation, timeout)

    async def _enrol(self, opened: Opened, invitation: Invitation | None, timeout: float) -> Access:
        """Without an invitation the coordinator must know the key by another name."""
        if not opened.access.enrolled:
            if (other := other_key(opened.access)) is not None:
                raise NotAdmitted(
                    "NAME_TAKEN",
                    f"this user is known there as {other.name!r} already, with another key and the role {other.role}, which "
                    f"would be lost; take another name, like dtfm-node join --id NAME",
                )
            keep(opened.access)
        request = _enrol_request(opened.access, invitation, self._roles)
        reply = await _call(opened, "Coordinator", "Enrol", request, timeout)
        try:
            role = Role(reply.role)
        except ValueError:
            raise NotAdmitted(
                "ROLE", f"the coordinator gives a role that this dtfm does not know: {reply.role[:20]!r}"
            ) from None
        addresses = opened.access.addresses if invitation is None else invitation.addresses
        run = reply.run[:MOST_RUN_CHARACTERS]
        access = replace(opened.access, addresses=addresses, role=role, enrolled=True, run=run)
        keep(access)
        return access

    def _known(self, pin: bytes) -> Access | None:
        if self._used is not None and self._used.pin == pin:
            return self._used
        mine = _enrolled(self._roles, pin, self._name if Role.NODE in self._roles else "")
        return next(iter(mine or _enrolled(self._or_as, pin)), None)

    def _key_here(self, pin: bytes) -> bytes | None:
        """The key by which the coordinator knows other nodes of this user's on this machine: it is this one's too."""
        if Role.NODE not in self._roles:
            return None
        return next((access.key for access in _enrolled([Role.NODE], pin)), None)

    def _newest(self) -> Access | None:
        others = self._or_as or (Role.OPERATOR,) * (Role.NODE in self._roles)
        return next(iter(_enrolled([*self._roles, *others])), None)


def _enrol_request(access: Access, invitation: Invitation | None, roles: Sequence[Role]) -> EnrolRequest:
    return EnrolRequest(
        protocol_version=PROTOCOL_VERSION,
        invitation=invitation.id if invitation is not None else "",
        secret=invitation.secret if invitation is not None else b"",
        name=access.name,
        public_key=public_key(access.key),
        roles=[role.value for role in roles],
    )


def _read_place(where: str) -> Invitation | str:
    where = where.strip().strip("\"'").strip()  # Docker's --env-file keeps quotes
    path = Path(where)
    if where and ":" not in where and _is_file(path):
        try:
            with path.open() as file:
                return read_invitation(file.read(MOST_CHARACTERS + 1))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read an invitation from {where}: {error}") from None
    if text := invitation_in(where):
        return read_invitation(text)
    if where:
        try:
            read_address(where)
        except ValueError as error:
            raise ValueError(f"{error}; or an invitation (dtfm1....), or a file with one") from None
    return where


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # an invitation may be too long for a file's name
        return path.is_file()
    return False


def _enrolled(roles: Sequence[Role], pin: bytes | None = None, name: str = "") -> list[Access]:
    return [access for access in kept(roles, pin, name) if access.enrolled]


async def _invite(opened: Opened, name: str, timeout: float) -> Invitation:
    """For a node on the machine of an operator."""
    request = InviteRequest(
        name=name, role=Role.NODE.value, seconds=OWN_INVITATION_SECONDS, uses=1, believed=opened.access.own
    )
    return read_invitation((await _call(opened, "Observer", "Invite", request, timeout)).invitation)


async def _call(opened: Opened, service: str, method: str, request: Message, timeout: float) -> Any:
    """The coordinator's answer. Raises NotAdmitted and ConnectionError."""
    async with opened.channel(timeout) as channel:
        try:
            stub = services.stub(service, channel)
            return await getattr(stub, method)(request, metadata=opened.metadata, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if (refusal := refusal_in(error)) is not None:
                raise refusal from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                sentence = "the coordinator is of an older version; update dtfm there"
                raise NotAdmitted("PROTOCOL_VERSION", sentence) from None
            raise ConnectionError(f"{error.code().name}: {error.details()}") from None
