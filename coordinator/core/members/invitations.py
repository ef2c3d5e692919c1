"""Access to the run: invitations, the names and keys that they enrol, and how both end."""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Collection, Sequence

from dtfm.coordinator.core.refusal import Refused, name_some, require, shorten
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.admission import check_name, check_version
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.access import MOST_INVITATIONS, Holder, Invited
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.wording import utc
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.access import MOST_NAMES_OF_A_KEY, Role
from dtfm.protos.identity.invitation import ID_BYTES, secret_digest

INVITATION_ID = re.compile(f"[0-9a-f]{{{2 * ID_BYTES}}}")
MOST_USES = 1000
MOST_SECONDS = 366 * 86400.0
MOST_NAMES = 10_000
"""The number of names that may be enrolled at a time."""


def invite(
    transition: Transition, request: wire.InviteRequest, by: str, at: float, invitation: tuple[str, str]
) -> wire.InviteReply:
    """Makes the ``invitation`` with this id and digest of its secret. Raises Refused."""
    role, seconds, uses = request.role, request.seconds, request.uses
    require(role in tuple(Role), "role", role, f"one of {', '.join(Role)}")
    require(not request.believed or role == Role.NODE, "believed", True, f"for the role {Role.NODE}")
    require(1 <= uses <= MOST_USES, "uses", uses, f"1 to {MOST_USES}")
    days = MOST_SECONDS / 86400
    require(1 <= seconds <= MOST_SECONDS, "expires", seconds, f"1 second to {days:.0f} days from now")
    usable = sum(invited.is_usable(at) for invited in transition.state.ledger.access.invitations.values())
    if usable >= MOST_INVITATIONS:
        raise Refused(wire.FULL, f"{usable} invitations are good still, as many as can be; revoke some")
    id, digest = invitation
    expires, name = at + seconds, shorten(request.name, 64)
    transition.emit(ev.InvitationMade(id, digest, name, role, at, expires, uses, by, request.believed))
    return wire.InviteReply(id=id, expires=expires)


def enrol(transition: Transition, request: wire.EnrolRequest, at: float) -> wire.EnrolReply:
    """Binds the key to the name. Raises Refused."""
    holder = check_enrolment(transition.state.ledger, request, at)
    if transition.state.ledger.access.names.get(request.name) != holder:
        transition.emit(ev.Enrolled(request.name, holder.role, holder.key, holder.invitation, holder.believed))
    return wire.EnrolReply(role=holder.role)


def look(state: State, request: wire.EnrolRequest, at: float) -> wire.EnrolReply:
    """Answers a dry request: the answer to enrolling, what the run trains, and what its members have. Changes nothing, and
    computes nothing that takes long, since strangers may ask. Raises Refused."""
    holder, ledger = check_enrolment(state.ledger, request, at), state.ledger
    reply = wire.EnrolReply(role=holder.role, run=state.run.name, training=state.message)
    if (described := ledger.described) is not None:
        reply.data_confirmed = ledger.data_confirmed
        reply.prepared.CopyFrom(
            wire.Prepared(
                data_fingerprint=bytes.fromhex(described.data_fingerprint),
                weights_fingerprint=bytes.fromhex(described.weights_fingerprint),
                training_samples=described.training_samples,
                evaluation_samples=described.evaluation_samples,
                tokens_per_sample=described.tokens_per_sample,
                unigram_entropy=described.unigram_entropy,
                files=[file.message for file in described.files],
            )
        )
    return reply


def check_enrolment(ledger: Ledger, request: wire.EnrolRequest, at: float) -> Holder:
    """The holder of the requested name. Raises Refused.

    A node that was enrolled before needs no invitation. A viewer who shows an operator's invitation becomes an operator. A
    further node with the key of an enrolled node needs none either: a machine with several devices uses an invitation once."""
    check_version(request.protocol_version)
    check_name(request.name)
    key = base64.b64encode(request.public_key).decode()
    holder, invited = ledger.access.names.get(request.name), ledger.access.invitations.get(request.invitation)
    if (why := ledger.trust.quarantined.get(key)) is not None:
        raise Refused(
            wire.QUARANTINED, f"the key is that of {why.node}, which is quarantined: {why.charge}: {why.reason}"
        )
    if holder is None or holder.key != key:
        known = (other for other in ledger.access.names.values() if other.key == key and other.role == Role.NODE)
        same_machine = next(known, None) if Role.NODE in request.roles else None
        shown = same_machine or _shown(ledger, request, at, key)
        _check_free(ledger, request.name, holder)
        _check_room(ledger, key)
        if len(ledger.access.names) >= MOST_NAMES:
            raise Refused(wire.FULL, f"{MOST_NAMES} names are enrolled, as many as can be")
        holder = shown
    elif holder.role == Role.VIEWER and invited is not None and invited.role == Role.OPERATOR:
        holder = _shown(ledger, request, at, key)
    _check_role(holder.role, request)
    return holder


def revoke(transition: Transition, what: str, by: str, at: float) -> str:
    """Ends an invitation for people who have not used it yet, or all access of a name. With a name also end the invitation that
    it came by and the invitations that it made: their holders could come again under another name. Returns a sentence. Raises
    Refused."""
    ledger = transition.state.ledger
    if (holder := ledger.access.names.get(what)) is not None:
        concerned = {
            id for id, invited in ledger.access.invitations.items() if id == holder.invitation or invited.by == what
        }
        ended = tuple(sorted(id for id in concerned if ledger.access.invitations[id].is_usable(at)))
        others = sorted(name for name, other in ledger.access.names.items() if other.key == holder.key and name != what)
        for name in (what, *others):
            transition.emit(ev.Revoked(name, ended if name == what else (), at, by))
        told = wire.Revoked(names=sorted(transition.state.ledger.access.revoked))
        peers = transition.state.members.sessions.keys() - {what, *others}
        transition.send(peers, wire.CoordinatorMessage(revoked=told))
        sentence = f"{what} ({holder.role}) is cut off"
        if others:
            sentence += f", with {name_some(others)} on the same machine"
        if ended:
            sentence += (
                f", and {_not_good(ended, ', by which it came or which it made,')}; who else needs one: invite again"
            )
        return sentence + _who_stays(transition.state.ledger, concerned)
    if what in ledger.access.invitations:
        invitations = ledger.access.invitations
        made = sorted(id for id, invited in invitations.items() if invited.by == what and invited.is_usable(at))
        transition.emit(ev.Revoked("", (what, *made), at, by))
        return _not_good((what, *made)) + _who_stays(ledger, {what, *made})
    raise Refused(
        wire.MALFORMED,
        f"there is no invitation and no name {shorten(repr(what), 80)}; `dtfm-coordinator events` shows them",
    )


def _not_good(ended: Sequence[str], which: str = "") -> str:
    many = len(ended) > 1
    return f"invitation{'s' if many else ''} {name_some(ended)}{which} {'are' if many else 'is'} not good any more"


def _who_stays(ledger: Ledger, invitations: Collection[str]) -> str:
    came = sorted(name for name, holder in ledger.access.names.items() if holder.invitation in invitations)
    by = "it" if len(invitations) == 1 else "them"
    return f"; who came by {by} stays ({name_some(came)}), unless you revoke them by name" if came else ""


def check_operator(ledger: Ledger, by: str, at: float) -> None:
    """Checks that the caller is still an operator: a name, or the invitation whose link opened the page. Its access may have been
    revoked while the call waited. Raises Refused."""
    invited = ledger.access.invitations.get(by)
    if invited is not None and invited.role == Role.OPERATOR and invited.is_usable(at):
        return
    holder = ledger.access.names.get(by)
    if holder is None:
        raise Refused(wire.REVOKED, f"the access of {by!r} was revoked")
    if holder.role != Role.OPERATOR:
        raise Refused(wire.ROLE, f"this is for the role {Role.OPERATOR}, and {by} is a {holder.role}")


def _shown(ledger: Ledger, request: wire.EnrolRequest, at: float, key: str) -> Holder:
    """The holder that the key becomes by the invitation whose secret is shown. Raises Refused."""
    if not request.invitation:
        raise Refused(
            wire.UNKNOWN_KEY,
            "no node has this key here (any more); ask for an invitation (dtfm-coordinator invite), and give it once",
        )
    invited = _known(ledger, request.invitation, request.secret, at)
    if invited.used >= invited.uses:
        uses = f"{invited.uses} time{'s' if invited.uses > 1 else ''}"
        raise Refused(
            wire.INVITATION_USED_UP,
            f"invitation {request.invitation} was good for {uses}, and is used up; ask for a new one, or for one with more "
            "--uses",
        )
    return Holder(key, invited.role, request.invitation, invited.believed)


def check_viewer(ledger: Ledger, id: str, secret: bytes, at: float) -> Invited:
    """The invitation with this id and secret, which opens the page. Raises Refused."""
    invited = _known(ledger, id, secret, at)
    if not invited.opens_page(at):
        raise Refused(wire.ROLE, f"invitation {id} is for a {invited.role}, and the page is for the role {Role.VIEWER}")
    return invited


def _known(ledger: Ledger, id: str, secret: bytes, at: float) -> Invited:
    """The invitation whose secret is shown. Raises Refused if there is none, or it has ended."""
    invited = ledger.access.invitations.get(id)
    if invited is None or not hmac.compare_digest(invited.digest, secret_digest(secret)):
        raise Refused(
            wire.INVITATION_UNKNOWN,
            "this coordinator knows no such invitation: it is of another run, or of an earlier one; ask for a new one",
        )
    if invited.revoked:
        raise Refused(wire.REVOKED, f"invitation {id} was revoked; ask for a new one")
    if at >= invited.expires:
        raise Refused(
            wire.INVITATION_EXPIRED, f"invitation {id} was good until {utc(invited.expires)}; ask for a new one"
        )
    return invited


def _check_room(ledger: Ledger, key: str) -> None:
    """Raises Refused if the key already has as many names as allowed, in any role."""
    names = sum(holder.key == key for holder in ledger.access.names.values())
    if names >= MOST_NAMES_OF_A_KEY:
        raise Refused(
            wire.FULL,
            f"this machine has {names} names in the run, as many as one may have; come back under one of them",
        )


def _check_free(ledger: Ledger, name: str, holder: Holder | None) -> None:
    if INVITATION_ID.fullmatch(name):
        raise Refused(
            wire.MALFORMED,
            f"the name {name!r} reads like the id of an invitation, and `revoke` takes either; give another with --id NAME",
        )
    if holder is not None:
        raise Refused(
            wire.NAME_TAKEN, f"the name {name!r} belongs to another key; give this one its own with --id NAME"
        )
    if name in ledger.access.revoked:
        raise Refused(wire.NAME_TAKEN, f"the name {name!r} was revoked, for good; give another with --id NAME")


def _check_role(role: str, request: wire.EnrolRequest) -> None:
    if role not in request.roles:
        wanted = shorten(" or ".join(request.roles[: len(Role)]), 60)
        raise Refused(
            wire.ROLE,
            f"this needs the role {wanted}, and the invitation is for a {role}; ask for another (invite --role)",
        )
