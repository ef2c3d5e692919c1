"""Asks a scripted coordinator for invitations, enrolments and revocations."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.protos import PROTOCOL_VERSION, control_pb2 as wire
from dtfm.protos.identity.credentials import public_key
from dtfm.protos.identity.invitation import secret_digest
from tests.coordinator.script import World
from tests.protos.members import key_of

NOW = 1_800_000_000.0
DAY = 86400.0
ID, SECRET = "0123456789ab", bytes(32)


class Door:
    """Asks one thing after the other of a World, at ``now`` (seconds since 1970). The operator is enrolled there."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = NOW
        self._ticket = 0
        self.enrolled("operator", "operator")

    def enrolled(self, name: str, role: str, invitation: str = "") -> None:
        """By whom the test does not care."""
        key = base64.b64encode(public_key(key_of(name))).decode()
        state = self.world.state
        ledger = fold([ev.Enrolled(name, role, key, invitation)], state.ledger)
        self.world.state = replace(state, ledger=ledger)
        self.world.start = fold([ev.Enrolled(name, role, key, invitation)], self.world.start)

    def invite(self, id: str = ID, by: str = "operator", **changes: Any) -> wire.RefusalReason | None:
        request = wire.InviteRequest(**{"name": "Bob", "role": "node", "seconds": 7 * DAY, "uses": 1, **changes})
        return self._ask(t.Asked(self._next(), request, by, self.now, (id, secret_digest(SECRET))))

    def enrol(self, name: str = "a", key: str | None = None, **changes: Any) -> wire.RefusalReason | None:
        fields = {
            "protocol_version": PROTOCOL_VERSION,
            "invitation": ID,
            "secret": SECRET,
            "name": name,
            "public_key": public_key(key_of(key or name)),
            "roles": ["node"],
        }
        return self._ask(t.Asked(self._next(), wire.EnrolRequest(**{**fields, **changes}), "", self.now))

    def revoke(self, what: str, by: str = "operator") -> wire.RefusalReason | None:
        return self._ask(t.Asked(self._next(), wire.RevokeRequest(what=what), by, self.now))

    def expel(self, node: str, reason: str = "it was slow on purpose", by: str = "operator") -> str:
        """Returns the sentence, of an answer or of a refusal."""
        self._ask(t.Asked(self._next(), wire.ExpelRequest(node=node, reason=reason), by, self.now))
        return self.sentence

    def forgive(self, node: str, by: str = "operator") -> str:
        """Returns the sentence, of an answer or of a refusal."""
        self._ask(t.Asked(self._next(), wire.ForgiveRequest(node=node), by, self.now))
        return self.sentence

    @property
    def sentence(self) -> str:
        """Of the last refusal, or of the last answer that is a sentence."""
        if self._ticket in self.world.refusals:
            return str(self.world.refusals[self._ticket])
        granted = self.world.granted[self._ticket]
        return granted.sentence if isinstance(granted, wire.Done) else ""

    def _next(self) -> int:
        self._ticket += 1
        return self._ticket

    def _ask(self, question: t.Input) -> wire.RefusalReason | None:
        """The reason of the refusal; None: it was granted."""
        self.world.feed(question)
        refused = self.world.refusals.get(self._ticket)
        assert (refused is None) == (self._ticket in self.world.granted)
        return refused.reason if refused is not None else None
