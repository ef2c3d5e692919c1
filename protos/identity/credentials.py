"""Who is at the other end of a connection: a run's certificate authority, the nodes' certificates, and the gRPC credentials made
from them.

The coordinator is the run's authority: it has a key, and certifies itself. Who is invited knows the hash of that key's public
half (the pin), and talks to nobody else. Each node has a key too, which belongs to its name from its first use on, and gets
certificates for it that last a day. Between nodes both sides show certificates: a connection is made only if the other side is
the expected node, and a call's caller is the name in its certificate.

Keys are ECDSA P-256, and TLS is 1.2 or later as gRPC has it. All certificates and private keys here are PEM.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dtfm.protos.connection import Way, read_address
from dtfm.protos.identity.proof import CLOCKS_APART, ClockError

COORDINATOR_NAME = "coordinator.dtfm"
"""The server name in the authority's certificate, whatever its address."""
CERTIFIED_SUFFIX = ".node.dtfm"
"""How every node's name in a certificate ends."""
CERTIFICATE_LIFETIME = timedelta(days=1)
"""Of a node's certificate. It is renewed when half of this has passed."""
AUTHORITY_BEGINS = datetime(2024, 1, 1, tzinfo=UTC)
"""From when on the authority's certificate is valid: long ago, so that a wrong clock is noticed where it can be named."""
AUTHORITY_LIFETIME = timedelta(days=3650)
MOST_KEY_BYTES = 512
"""Largest public key that is looked at; one on P-256 has 91 bytes."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What one side shows: its certificate and that certificate's key. ``authority`` is the certificate that it trusts."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def make_key() -> bytes:
    """Makes a new private key."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def is_key(key: bytes) -> bool:
    """Whether these bytes are a private key as ``make_key`` makes them."""
    try:
        loaded = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return isinstance(loaded, ec.EllipticCurvePrivateKey) and isinstance(loaded.curve, ec.SECP256R1)


def public_key(key: bytes) -> bytes:
    """The public half of the private ``key``: its SubjectPublicKeyInfo (DER)."""
    return _private(key).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def read_public_key(key: bytes) -> ec.EllipticCurvePublicKey:
    """Raises ValueError unless ``key`` is the SubjectPublicKeyInfo (DER) of a key on P-256."""
    try:
        loaded = load_der_public_key(key) if len(key) <= MOST_KEY_BYTES else None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        loaded = None
    if not isinstance(loaded, ec.EllipticCurvePublicKey) or not isinstance(loaded.curve, ec.SECP256R1):
        raise ValueError("this is not a public key on P-256 (SubjectPublicKeyInfo, DER)")
    return loaded


def make_authority(key: bytes, now: datetime) -> Identity:
    """The run's authority, which is also the coordinator's own identity, from the private ``key`` (make_key)."""
    private, ends = _private(key), now + AUTHORITY_LIFETIME
    issuer = _subject(COORDINATOR_NAME)
    unsigned = _unsigned(COORDINATOR_NAME, issuer, private.public_key(), AUTHORITY_BEGINS, ends, is_authority=True)
    certificate = unsigned.sign(private, hashes.SHA256()).public_bytes(Encoding.PEM)
    return Identity(certificate, certificate, key)


def nobody() -> Identity:
    """An identity of no run: nobody trusts it, and it trusts nobody."""
    return make_authority(make_key(), datetime.now(UTC))


def pin_of(certificate: bytes) -> bytes:
    """SHA-256 of the certificate's SubjectPublicKeyInfo, by which an authority is known. Raises ValueError."""
    key = x509.load_pem_x509_certificate(certificate).public_key()
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


async def shown_certificate(address: str, timeout: float) -> bytes:
    """The certificate that the server at HOST:PORT shows, whoever it is. Nothing is sent. Raises ConnectionError when nothing
    answers with TLS within ``timeout`` seconds."""
    host, port = read_address(address)
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host, port, ssl=_anybody(), server_hostname=COORDINATOR_NAME)
    except TimeoutError:
        raise ConnectionError(f"no answer within {timeout:.0f} s") from None
    except OSError as error:  # ssl.SSLError is one
        of_system = (error.errno or 0) > 0 and not isinstance(error, ssl.SSLError)
        raise ConnectionError(
            os.strerror(error.errno or 0) if of_system else str(error) or type(error).__name__
        ) from error
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(shown).encode()


async def fetch_authority(addresses: Sequence[str], pin: bytes, timeout: float) -> tuple[str, bytes]:
    """The address at which the authority with this ``pin`` answers first, and its certificate. All are tried side by side.

    Raises ConnectionError when at an address nothing answers, as the coordinator may come back there, PermissionError when
    others answer at all of them, and ClockError as ``in_time`` does.
    """
    tries = {asyncio.create_task(shown_certificate(address, timeout)): address for address in addresses}
    problems, others = [], []
    try:
        pending = set(tries)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                try:
                    certificate = attempt.result()
                    if pin_of(certificate) == pin:
                        return tries[attempt], in_time(certificate)
                    others.append(tries[attempt])
                except ClockError:
                    raise
                except (ConnectionError, ValueError) as error:
                    problems.append(f"{tries[attempt]}: {error}" if len(tries) > 1 else str(error))
    finally:
        for attempt in tries:
            attempt.cancel()
    if others:
        stranger = (
            f"who answers at {others[0]} is not the coordinator that was named: either the invitation is of another run, or "
            f"somebody else answers there; ask for a new invitation, and do not go on if it says the same"
        )
        if not problems:
            raise PermissionError(stranger)
        problems.append(stranger)
    raise ConnectionError("; ".join(problems))


def in_time(certificate: bytes) -> bytes:
    """The coordinator's ``certificate``. Raises ClockError when this machine's clock is before its time, or after it: TLS would
    refuse it without saying why."""
    loaded, now = x509.load_pem_x509_certificate(certificate), datetime.now(UTC)
    begins, ends = loaded.not_valid_before_utc, loaded.not_valid_after_utc
    if not begins <= now <= ends:
        raise ClockError(
            f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC, and the coordinator's certificate is good from "
            f"{begins:%Y-%m-%d} to {ends:%Y-%m-%d}; set the clock, like timedatectl set-ntp true"
        )
    return certificate


def issue(
    authority: Identity,
    key: ec.EllipticCurvePublicKey,
    node: str,
    now: datetime,
    lifetime: timedelta = CERTIFICATE_LIFETIME,
) -> bytes:
    """A certificate for ``node``, to which ``key`` belongs, as the caller has checked."""
    issuer = x509.load_pem_x509_certificate(authority.certificate).subject
    begins = now - 2 * CLOCKS_APART  # two nodes, each as far from the coordinator as it may be
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _unsigned(certified_name(node), issuer, key, begins, now + lifetime, is_authority=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(_private(authority.key), hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )


def is_half_over(certificate: bytes, now: datetime) -> bool:
    """Whether less than half of the certificate's time is left, so that connections made with it should be replaced."""
    loaded = x509.load_pem_x509_certificate(certificate)
    return now > loaded.not_valid_before_utc + (loaded.not_valid_after_utc - loaded.not_valid_before_utc) / 2


def certified_name(node: str) -> str:
    """The name of ``node`` in certificates: a host name of bounded length, whatever characters the node's name has."""
    return f"{hashlib.sha256(node.encode()).hexdigest()[:32]}{CERTIFIED_SUFFIX}"


def shown_name(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """The name in the caller's certificate (see ``certified_name``); empty when it shows none."""
    return next((name.decode("latin-1") for name in auth_context.get("x509_subject_alternative_name", ())), "")


def shown_key(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """The public key in the caller's certificate, which several names may share (base64); its name where gRPC tells no more, and
    empty when it shows none."""
    pem = next(iter(auth_context.get("x509_pem_cert", ())), b"")
    return _key_in(pem) if pem else shown_name(auth_context)


@lru_cache(maxsize=4096)
def _key_in(pem: bytes) -> str:
    key = x509.load_pem_x509_certificate(pem).public_key()
    return base64.b64encode(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode()


def shows_certificate(auth_context: Mapping[str, Iterable[bytes]], node: str) -> bool:
    """Whether a call (``context.auth_context()``) comes from ``node``, according to its certificate."""
    return certified_name(node).encode() in auth_context.get("x509_subject_alternative_name", ())


def coordinator_credentials(authority: Identity) -> grpc.ServerCredentials:
    """Credentials of the coordinator's server. It asks callers for no certificate, since a node that joins has none yet."""
    return grpc.ssl_server_credentials([(authority.key, authority.certificate)])


def peer_credentials(identity: Callable[[], Identity]) -> grpc.ServerCredentials:
    """Credentials of a node's server, which accepts only callers with a certificate of the run.

    ``identity`` is called at every handshake, from any thread: a node listens before it is certified, and may be
    certified again.
    """
    shown = identity()

    def newer() -> Any:  # None means unchanged (types-grpcio does not know this)
        nonlocal shown
        if (now := identity()) is shown:
            return None
        shown = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(_configuration(shown), newer, require_client_authentication=True)


def to_coordinator(authority: bytes) -> Way:
    """Leads to the coordinator that has this authority's key, whatever its address."""
    return grpc.ssl_channel_credentials(authority), _named(COORDINATOR_NAME)


def to_peer(identity: Identity, node: str) -> Way:
    """Leads to ``node``, whatever its address; another node there is refused."""
    credentials = grpc.ssl_channel_credentials(identity.authority, identity.key, identity.certificate)
    return credentials, _named(certified_name(node))


def _named(name: str) -> tuple[tuple[str, str]]:
    return (("grpc.ssl_target_name_override", name),)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.certificate)], identity.authority)


def _anybody() -> ssl.SSLContext:
    """Accepts any certificate, in order to look at it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # gRPC's servers require it
    return context


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    loaded = load_pem_private_key(key, None)
    assert isinstance(loaded, ec.EllipticCurvePrivateKey)
    return loaded


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _unsigned(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begins: datetime,
    ends: datetime,
    *,
    is_authority: bool,
) -> x509.CertificateBuilder:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=is_authority, **unused)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    )
