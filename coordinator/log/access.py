"""Access to the run: invitations, the names and keys that they enrol, and how both end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from dtfm.coordinator.log.members import recounted
from dtfm.coordinator.log.wording import utc
from dtfm.protos.identity.access import Role

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

MOST_INVITATIONS = 1000
"""From this number on, invitations that are no longer good are forgotten."""

MOST_REVOKED = 10_000
"""The number of revoked names that are remembered. From then on the oldest is forgotten for each new one."""


@dataclass(frozen=True, slots=True)
class Invited:
    """An invitation."""

    digest: str
    """SHA-256 of its secret (hex)."""
    role: str
    """The role that it gives."""
    expires: float
    """Seconds since 1970."""
    uses: int
    """The number of keys that it may enrol."""
    by: str
    """The operator who made it."""
    used: int = 0
    """The number of keys that it has enrolled."""
    revoked: bool = False
    """Whether it was revoked."""
    believed: bool = False
    """Whether the word of nodes that come by it decides."""

    def is_usable(self, at: float) -> bool:
        """Whether it can still enrol a key, or open the page, which uses up nothing."""
        is_used_up = self.role == Role.NODE and self.used >= self.uses
        return not (self.revoked or at >= self.expires or is_used_up)

    def opens_page(self, at: float) -> bool:
        return self.role != Role.NODE and self.is_usable(at)


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a name. ``key``: SubjectPublicKeyInfo in base64. ``invitation``: the one that it came by; empty: none.
    ``believed``: the word of this node decides."""

    key: str
    role: str
    invitation: str
    believed: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """Names, invitations and revoked names: which callers may do what."""

    names: Mapping[str, Holder] = field(default_factory=dict)
    invitations: Mapping[str, Invited] = field(default_factory=dict)
    """By id."""
    revoked: Mapping[str, float] = field(default_factory=dict)
    """Names, the oldest first, and when they were revoked (seconds since 1970). No other key gets such a name: a connection that
    was opened before may outlive every certificate."""


@dataclass(frozen=True, slots=True)
class InvitationMade:
    """``digest``: SHA-256 of its secret (hex). ``name``: the invited person. ``at``: seconds since 1970. For the others see
    Invited."""

    invitation: str
    digest: str
    name: str
    role: str
    at: float
    expires: float
    uses: int
    by: str
    believed: bool = False
    event: Literal["invitation_made"] = "invitation_made"

    def apply(self, ledger: Ledger) -> Ledger:
        known = ledger.access.invitations
        if len(known) >= MOST_INVITATIONS:
            known = {id: invited for id, invited in known.items() if invited.is_usable(self.at)}
        made = Invited(self.digest, self.role, self.expires, self.uses, self.by, believed=self.believed)
        return replace(ledger, access=replace(ledger.access, invitations={**known, self.invitation: made}))

    def narrate(self) -> str:
        whom = f" for {self.name}" if self.name else ""
        uses = f"{self.uses} use{'s' if self.uses > 1 else ''}"
        role = f"{self.role}, believed" if self.believed else self.role
        return f"{self.by} made invitation {self.invitation}{whom} (role {role}, {uses}, until {utc(self.expires)})"


@dataclass(frozen=True, slots=True)
class Enrolled:
    """The name belongs to ``key`` (SubjectPublicKeyInfo in base64) from now on. ``invitation``: the one that was used; empty for
    the user who runs the coordinator."""

    name: str
    role: str
    key: str
    invitation: str
    believed: bool = False
    event: Literal["enrolled"] = "enrolled"

    def apply(self, ledger: Ledger) -> Ledger:
        access, holder = ledger.access, Holder(self.key, self.role, self.invitation, self.believed)
        of_a_machine = (
            self.role == Role.NODE and holder in access.names.values()
        )  # another node of its machine came before
        invitations = access.invitations
        if (used := invitations.get(self.invitation)) is not None and not of_a_machine:
            invitations = {**invitations, self.invitation: replace(used, used=used.used + 1)}
        names = {**access.names, self.name: holder}
        return recounted(replace(ledger, access=replace(access, names=names, invitations=invitations)))

    def narrate(self) -> str:
        how = f" by invitation {self.invitation}" if self.invitation else ", on the coordinator's machine"
        return f"{self.name} was enrolled as {self.role}{', believed,' if self.believed else ''}{how}"


@dataclass(frozen=True, slots=True)
class Revoked:
    """All access of ``name`` has ended, and the ``invitations`` are no longer good. ``at``: seconds since 1970."""

    name: str
    invitations: tuple[str, ...]
    at: float
    by: str
    event: Literal["revoked"] = "revoked"

    def apply(self, ledger: Ledger) -> Ledger:
        access, who = ledger.access, ledger.party(self.name)
        revoked = {**access.revoked, self.name: self.at} if self.name else access.revoked
        ended = Access(
            names={name: holder for name, holder in access.names.items() if name != self.name},
            invitations={
                id: replace(invited, revoked=invited.revoked or id in self.invitations)
                for id, invited in access.invitations.items()
            },
            revoked=dict(list(revoked.items())[-MOST_REVOKED:]),
        )
        worked = {node: steps for node, steps in ledger.trust.worked.items() if node != self.name}
        trust = replace(ledger.trust.without_witness(who).without_audits({who}), worked=worked)
        return recounted(replace(ledger, access=ended, trust=trust))

    def narrate(self) -> str:
        ended = [self.name] if self.name else []
        ended += [f"invitation {id}" for id in self.invitations]
        return f"{self.by} revoked {' and '.join(ended)}"
