"""How a call to the coordinator shows who makes it: a JSON Web Token (RFC 7519) in its metadata, signed with the caller's key
(ES256, RFC 7518). It names the caller and the one authority that it is meant for, and holds for minutes. The coordinator knows
the key that belongs to the name, so no certificate is needed, which operators would have to renew; Python's gRPC servers cannot
ask for one only if the caller has one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

Metadata = tuple[tuple[str, str], ...]

CLOCKS_APART = timedelta(minutes=5)
"""How far two machines' clocks may differ (as in Kerberos, RFC 4120)."""
LET_IN: Metadata = (("dtfm-let-in", "1"),)
"""What the coordinator sends first on a stream that it lets a caller open. The caller sends nothing before: gRPC replaces the
status of a refusal that meets a message by its own INTERNAL."""
MOST_CHARACTERS = 2048
_SCHEME = "Bearer "


class ProofError(ValueError):
    """The call does not show who makes it."""


class ClockError(ProofError):
    """The clocks are too far apart. The sentence names both."""


def proof(key: bytes, name: str, pin: bytes, now: float | None = None) -> Metadata:
    """The metadata of a call by ``name``, whose ``key`` (PEM) it is, to the coordinator whose authority has this ``pin``."""
    claims = {"sub": name, "aud": pin.hex(), "iat": int(time.time() if now is None else now)}
    return (("authorization", _SCHEME + jwt.encode(claims, key.decode(), algorithm="ES256")),)


def is_let_in(initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether the coordinator lets the caller open the stream; otherwise the stream ends with a refusal."""
    return any(entry == LET_IN[0] for entry in initial_metadata or ())


def claimed_name(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, str]:
    """The name that a call claims, and the proof of it, which is still to be checked. Raises ProofError."""
    shown = next((value for key, value in metadata or () if key == "authorization"), "")
    shown = shown.decode("latin-1") if isinstance(shown, bytes) else shown
    if not shown.startswith(_SCHEME) or len(shown) > MOST_CHARACTERS:
        raise ProofError("the call shows no key")
    token = shown.removeprefix(_SCHEME)
    try:
        name = jwt.decode(token, options={"verify_signature": False}).get("sub")
    except jwt.PyJWTError as error:
        raise ProofError(f"the call shows no key ({error})") from None
    if not isinstance(name, str):
        raise ProofError("the call names nobody")
    return name, token


def check_proof(token: str, key: ec.EllipticCurvePublicKey, pin: bytes, now: float) -> None:
    """Raises ProofError unless the owner of ``key`` made the token for the authority with this ``pin`` just now."""
    try:
        claims = jwt.decode(
            token,
            key,
            algorithms=["ES256"],
            audience=pin.hex(),
            options={"require": ["sub", "aud", "iat"], "verify_iat": False},
        )
        made = float(claims["iat"])
        theirs = datetime.fromtimestamp(made, UTC)
    except (jwt.PyJWTError, TypeError, ValueError, OverflowError, OSError) as error:
        raise ProofError(f"the call was not made with the key that belongs to this name ({error})") from None
    if abs(made - now) > CLOCKS_APART.total_seconds():
        raise ClockError(
            f"your clock says {_utc(theirs)}, the coordinator's {_utc(datetime.fromtimestamp(now, UTC))}; they may differ by "
            f"{CLOCKS_APART.total_seconds() / 60:.0f} minutes: set the one that is wrong, like timedatectl set-ntp true"
        )


def _utc(when: datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")
