"""Who may make which call: the one table, and the one check that every call goes through."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from dtfm.coordinator.core.refusal import Refused, shorten
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.service.port.front import Front
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.credentials import read_public_key
from dtfm.protos.identity.proof import ClockError, ProofError, check_proof, claimed_name
from dtfm.protos.token_bucket import TokenBucket

Context = grpc.aio.ServicerContext[Any, Any]

MAY_CALL: Mapping[str, frozenset[Role]] = {
    "Join": frozenset({Role.NODE}),
    "Put": frozenset({Role.NODE}),
    "Look": frozenset({Role.NODE, Role.OPERATOR}),
    "Get": frozenset({Role.NODE, Role.OPERATOR}),
    "Events": frozenset({Role.NODE, Role.VIEWER, Role.OPERATOR}),
    "PlanNow": frozenset({Role.OPERATOR}),
    "Invite": frozenset({Role.OPERATOR}),
    "Revoke": frozenset({Role.OPERATOR}),
    "Expel": frozenset({Role.OPERATOR}),
    "Forgive": frozenset({Role.OPERATOR}),
    "Steer": frozenset({Role.OPERATOR}),
}
"""Every method except Enrol: Enrol is for callers that have no role yet."""

CALLS_PER_SECOND, CALLS_AT_ONCE = 20.0, 500.0
"""Calls of one name: the lasting rate, and the most in a burst. A caller above it is answered later."""

_DENIED = (wire.ROLE, wire.REVOKED)


class Gate:
    """``pin``: of the authority. ``ledger`` returns the present ledger."""

    def __init__(self, pin: bytes, ledger: Callable[[], Ledger], front: Front) -> None:
        self._pin = pin
        self._ledger = ledger
        self._front = front
        self._budgets: dict[str, TokenBucket] = {}  # of enrolled names alone

    async def admit(self, context: Context, method: str) -> str:
        """The caller's name. Ends the call if its maker's role does not include ``method``."""
        self._front.called(context.peer())
        try:
            name, token = claimed_name(context.invocation_metadata())
            holder = self._ledger().access.names.get(name)
            if holder is None:
                raise self._unknown(name)
            self._check(token, base64.b64decode(holder.key))
            self.check_role(name, method)
            self.let_in(context, holder.key)
            budget = self._budgets.setdefault(name, TokenBucket(CALLS_PER_SECOND, CALLS_AT_ONCE))
            if pause := budget.draw(time.monotonic()):
                await asyncio.sleep(pause)
                self.check_role(name, method)  # it may have been revoked since
            return name
        except Refused as refused:
            await refuse(context, refused)
        except ProofError as error:
            await refuse(context, Refused(wire.UNKNOWN_KEY, str(error)))

    async def check_enrolment(self, context: Context, request: wire.EnrolRequest) -> None:
        """Ends the call unless the owner of the key to enrol makes it, under the name that the owner wishes."""
        self._front.called(context.peer())
        try:
            name, token = claimed_name(context.invocation_metadata())
            if name != request.name:
                raise Refused(wire.MALFORMED, "the call is made under another name than the one to be enrolled")
            self._check(token, request.public_key)
        except Refused as refused:
            await refuse(context, refused)
        except ProofError as error:
            await refuse(context, Refused(wire.MALFORMED, str(error)))

    def let_in(self, context: Context, key: str) -> None:
        """The caller has shown that it has this key (base64), and the key is admitted. Raises Refused if there are too many
        connections."""
        if not self._front.let_in(context.peer(), key):
            raise Refused(
                wire.BUSY, "this machine, or all together, have as many connections open as they may; close some"
            )

    def check_role(self, name: str, method: str) -> None:
        """Raises Refused unless ``name`` may call ``method`` now."""
        holder = self._ledger().access.names.get(name)
        if holder is None:
            raise self._unknown(name)
        if holder.role not in MAY_CALL[method]:
            roles = " or ".join(sorted(MAY_CALL[method]))
            raise Refused(
                wire.ROLE,
                f"{method} is for the role {roles}, and {name} is a {holder.role}; ask for an invitation with --role",
            )

    def sees_addresses(self, name: str) -> bool:
        """Whether this caller may know where members are."""
        holder = self._ledger().access.names.get(name)
        return holder is not None and holder.role == Role.OPERATOR

    def _check(self, token: str, key: bytes) -> None:
        try:
            check_proof(token, read_public_key(key), self._pin, time.time())
        except ClockError as error:
            raise Refused(wire.WRONG_CLOCK, str(error)) from None
        except ProofError:
            raise
        except ValueError as error:
            raise Refused(wire.MALFORMED, f"public_key: {error}") from None

    def _unknown(self, name: str) -> Refused:
        named = shorten(repr(name), 80)
        if name in self._ledger().access.revoked:
            return Refused(wire.REVOKED, f"the access of {named} was revoked")
        return Refused(
            wire.UNKNOWN_KEY,
            f"this coordinator has enrolled nobody as {named}: it may have a new log; ask for an invitation (dtfm-coordinator "
            f"invite), and give it once",
        )


async def refuse(context: Context, refused: Refused) -> NoReturn:
    """Ends the call, with the reason's name and the sentence."""
    code = grpc.StatusCode.PERMISSION_DENIED if refused.reason in _DENIED else grpc.StatusCode.UNAUTHENTICATED
    await context.abort(code, f"{wire.RefusalReason.Name(refused.reason)}: {refused}")
    raise AssertionError("abort returns never")
