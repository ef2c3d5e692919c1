"""A run's authority, the same in every process, and identities of its members, for tests and benchmarks."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from dtfm.protos.identity.credentials import Identity, issue, make_authority, pin_of, public_key, read_public_key

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def key_of(name: str) -> bytes:
    """The private key of this name in all tests, so that a node that is started again has it."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()) >> 1  # less than the curve's order
    private = ec.derive_private_key(number, ec.SECP256R1())
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


AUTHORITY = make_authority(key_of("authority"), NOW)
PIN = pin_of(AUTHORITY.certificate)


def member(node: str, authority: Identity = AUTHORITY, now: datetime = NOW) -> Identity:
    key = key_of(node)
    certificate = issue(authority, read_public_key(public_key(key)), node, now, DAY)
    return Identity(authority.certificate, certificate, key)
