"""A run's authority, the same in every process, and identities of its members, for tests and benchmarks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from dtfm.protos.credentials import Identity, issue, make_authority, make_key, signing_request

TOKEN = "the run's"
NOW = datetime.now(UTC)
DAY = timedelta(days=1)
_KEY = ec.derive_private_key(2206_01288, ec.SECP256R1())
AUTHORITY = make_authority(_KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), TOKEN, NOW)


def member(node: str, authority: Identity = AUTHORITY, now: datetime = NOW) -> Identity:
    key = make_key()
    return Identity(authority.certificate, issue(authority, signing_request(key), node, now, DAY), key)
