"""An invitation: the one string by which somebody joins a run. It names the coordinator's addresses, the hash of its authority's
public key (which a joining node pins, as kubeadm and k3s do), and an id with a secret.

Its text is ``dtfm1.`` and, in base64url (RFC 4648 section 5) without padding: the number of bytes that follow (2 bytes, big
endian), a checksum of them (4 bytes), the pin (32), the id (6), the secret (32), then for each address its length (1) and its
characters. So a paste that lost its end is told from one with a wrong character.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from dataclasses import dataclass, field

from dtfm.protos.connection import read_address

PREFIX = "dtfm1."
PIN_BYTES = 32
ID_BYTES = 6
SECRET_BYTES = 32
MOST_ADDRESSES = 8
MOST_ADDRESS_BYTES = 255
MOST_CHARACTERS = 4096
"""Longest text that is looked at; the longest invitation has 2,842."""
_CHECK_BYTES = 4
_FIXED_BYTES = PIN_BYTES + ID_BYTES + SECRET_BYTES


@dataclass(frozen=True, slots=True)
class Invitation:
    """``addresses``: HOST:PORT of the coordinator, to be tried side by side. ``pin``: SHA-256 of its authority's
    SubjectPublicKeyInfo. ``id``: in hex, no secret. Raises ValueError if a field is out of bounds."""

    addresses: tuple[str, ...]
    pin: bytes
    id: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.addresses) <= MOST_ADDRESSES:
            raise ValueError(f"an invitation has 1 to {MOST_ADDRESSES} addresses, not {len(self.addresses)}")
        for address in self.addresses:
            read_address(address)
            if len(address.encode()) > MOST_ADDRESS_BYTES:
                raise ValueError(f"{address[:40]!r}... is too long: an address has at most {MOST_ADDRESS_BYTES} bytes")
        if len(self.pin) != PIN_BYTES or len(self.secret) != SECRET_BYTES or len(bytes.fromhex(self.id)) != ID_BYTES:
            raise ValueError("an invitation has a pin and a secret of 32 bytes, and an id of 6")

    def __str__(self) -> str:
        """The text to hand to whom is invited."""
        addresses = b"".join(bytes([len(a.encode())]) + a.encode() for a in self.addresses)
        body = self.pin + bytes.fromhex(self.id) + self.secret + addresses
        whole = len(body).to_bytes(2, "big") + _checksum(body) + body
        return PREFIX + base64.urlsafe_b64encode(whole).rstrip(b"=").decode()


def new_secret() -> tuple[str, bytes]:
    """An id and a secret, drawn at random."""
    return secrets.token_hex(ID_BYTES), secrets.token_bytes(SECRET_BYTES)


def secret_digest(secret: bytes) -> str:
    """What the coordinator keeps of a secret. A plain hash will do: nobody guesses 256 random bits."""
    return hashlib.sha256(secret).hexdigest()


def invitation_in(text: str) -> str:
    """The part of ``text`` that is meant as an invitation, of whatever version, as of a pasted command line; empty if there is
    none. An address or a path is none: an invitation has no colon, and does not follow a slash."""
    found = re.search(r"(?<![\w./\\-])dtfm[0-9]+\.", text)
    return "" if found is None or ":" in text else text[found.start() :]


def read_invitation(text: str) -> Invitation:
    """The inverse of ``str``. White space, as terminals and mails put in, is passed over. Raises ValueError, which says what is
    wrong with the text without showing it."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"this is no invitation: it has {len(text)} characters, more than {MOST_CHARACTERS}")
    text = "".join(text.split())
    if not text.startswith(PREFIX):
        version = text.partition(".")[0]
        if version.startswith("dtfm") and version[4:].isdigit():
            raise ValueError(f"this invitation is of version {version[4:6]}, this dtfm reads 1; update the older side")
        raise ValueError(f"this is no invitation: it does not begin with {PREFIX}; paste it whole")
    encoded = text.removeprefix(PREFIX).rstrip("=")
    try:
        # A cut may leave a lone character at the end, which stands for no byte.
        usable = encoded[: len(encoded) - (len(encoded) % 4 == 1)]
        whole = base64.b64decode(usable + "=" * (-len(usable) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("this invitation is mistyped: it has a character that none has; paste it again") from None
    size = int.from_bytes(whole[:2], "big") if len(whole) >= 2 else _FIXED_BYTES
    wanted = -(-(2 + _CHECK_BYTES + size) * 4 // 3)
    if len(encoded) < wanted:
        raise ValueError(
            f"this invitation is truncated: it has {len(text)} of {len(PREFIX) + wanted} characters; paste it whole"
        )
    body = whole[2 + _CHECK_BYTES :]
    if len(encoded) > wanted or len(body) != size or whole[2 : 2 + _CHECK_BYTES] != _checksum(body):
        raise ValueError("this invitation is mistyped: its checksum differs; paste it again")
    try:
        return _read_body(body)
    except (ValueError, IndexError) as problem:
        raise ValueError(f"this invitation was not made by dtfm: {problem}") from None


def _read_body(body: bytes) -> Invitation:
    pin, rest = body[:PIN_BYTES], body[PIN_BYTES:]
    id, secret, rest = rest[:ID_BYTES], rest[ID_BYTES : ID_BYTES + SECRET_BYTES], rest[ID_BYTES + SECRET_BYTES :]
    addresses = []
    while rest:
        length = rest[0]
        addresses.append(rest[1 : 1 + length].decode())
        if len(rest) < 1 + length:
            raise ValueError("an address is incomplete")
        rest = rest[1 + length :]
    return Invitation(tuple(addresses), pin, id.hex(), secret)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK_BYTES]
