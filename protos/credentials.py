"""Who may talk to whom: a run's certificate authority, the nodes' certificates, and the gRPC credentials made from them.

The coordinator is the run's authority: it makes a key once and certifies itself. Its certificate carries a proof that its
maker knows the run's token. A node knows only the token and an address, so the proof lets it tell the run's authority from an
attacker in between before it shows the token. Over that connection the node sends a signing request with its hello, and is
certified under its own name. Between nodes both sides show certificates: a connection is made only if the other side is the
expected node, and a call's caller is the name in its certificate.

Keys are ECDSA P-256, and TLS is 1.2 or later as gRPC has it. All certificates and keys here are PEM. Anybody who reaches the
coordinator can test guesses of the token against the proof, at the cost of scrypt (RFC 7914) per guess: draw a random token,
do not invent one. An empty token proves nothing: connections are encrypted, and anybody may join.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dtfm.protos.connection import Way, read_address

COORDINATOR_NAME = "coordinator.dtfm"
"""The server name in the authority's certificate, whatever its address."""
CERTIFIED_SUFFIX = ".node.dtfm"
"""How every node's name in a certificate ends."""
CLOCKS_APART = timedelta(days=1)
"""How far a node's clock may be behind the coordinator's before it rejects a fresh certificate as not yet valid."""
AUTHORITY_LIFETIME = timedelta(days=3650)
MAX_REQUEST_BYTES = 4096
"""Largest signing request."""


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


def make_authority(key: bytes, token: str, now: datetime) -> Identity:
    """The run's authority, which is also the coordinator's own identity, from the private ``key`` (make_key)."""
    private = _private(key)
    name = _subject(COORDINATOR_NAME, proof=_proof(private.public_key(), token))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(now + AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(COORDINATOR_NAME)]), critical=False)
        .sign(private, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    return Identity(certificate, certificate, key)


def nobody(now: datetime) -> Identity:
    """An identity of no run: nobody trusts it, and it trusts nobody."""
    return make_authority(make_key(), "", now)


def is_authority(certificate: bytes, token: str) -> bool:
    """Whether the maker of ``certificate`` knows ``token``."""
    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        key = loaded.public_key()
        shown = loaded.subject.get_attributes_for_oid(NameOID.DN_QUALIFIER)
    except ValueError:
        return False
    if not isinstance(key, ec.EllipticCurvePublicKey) or len(shown) != 1:
        return False
    return hmac.compare_digest(str(shown[0].value).encode(), _proof(key, token).encode())


async def fetch_authority(address: str, token: str, timeout: float) -> bytes:
    """Fetches the certificate of the run's authority from the coordinator at HOST:PORT, without sending anything secret.

    Raises ConnectionError when nothing answers with TLS within ``timeout`` seconds, and PermissionError when the answering
    side does not know ``token``.
    """
    host, port = read_address(address)
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host, port, ssl=_anybody(), server_hostname=COORDINATOR_NAME)
    except TimeoutError:
        raise ConnectionError(f"no answer within {timeout:.0f} s") from None
    except OSError as error:  # ssl.SSLError is one
        raise ConnectionError(str(error)) from error
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    certificate = ssl.DER_cert_to_PEM_cert(shown).encode()
    # The proof takes time (scrypt), so it is computed in a thread.
    if not await asyncio.to_thread(is_authority, certificate, token):
        raise PermissionError(
            f"the server at {address} does not know this run's token; check that the token and the address are the coordinator's"
        )
    return certificate


def signing_request(key: bytes) -> bytes:
    """A request to certify the private ``key``, which it does not contain."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(_private(key), hashes.SHA256()).public_bytes(Encoding.PEM)


def read_request(request: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a signing request. Raises ValueError unless the owner of that key made the request."""
    if len(request) > MAX_REQUEST_BYTES:
        raise ValueError(f"a signing request has at most {MAX_REQUEST_BYTES} bytes, not {len(request)}")
    try:
        wanted = x509.load_pem_x509_csr(request)
        key = wanted.public_key()
        genuine = wanted.is_signature_valid
    except (ValueError, TypeError, InvalidSignature) as problem:
        raise ValueError(f"this is not a signing request: {problem}") from None
    if not genuine or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("a signing request must be signed with the P-256 key that it names")
    return key


def issue(
    authority: Identity, request: bytes, node: str, now: datetime, lifetime: timedelta = AUTHORITY_LIFETIME
) -> bytes:
    """A certificate for ``node``, whose identity the caller has checked.

    Of ``request`` only the public key counts. Raises ValueError as read_request does.
    """
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(certified_name(node)))
        .issuer_name(x509.load_pem_x509_certificate(authority.certificate).subject)
        .public_key(read_request(request))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(certified_name(node))]), critical=False)
        .sign(_private(authority.key), hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )


def certified_name(node: str) -> str:
    """The name of ``node`` in certificates: a host name of bounded length, whatever characters the node's name has."""
    return f"{hashlib.sha256(node.encode()).hexdigest()[:32]}{CERTIFIED_SUFFIX}"


def shown_name(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """The name in the caller's certificate (see ``certified_name``); empty when it shows none."""
    return next((name.decode("latin-1") for name in auth_context.get("x509_subject_alternative_name", ())), "")


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


def _subject(name: str, proof: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if proof:
        attributes.append(x509.NameAttribute(NameOID.DN_QUALIFIER, proof))
    return x509.Name(attributes)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _proof(key: ec.EllipticCurvePublicKey, token: str) -> str:
    public = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hmac.new(_proof_key(token), public, hashlib.sha256).hexdigest()


@functools.lru_cache(4)
def _proof_key(token: str) -> bytes:
    if not token:
        return b""  # there is nothing to guess
    return hashlib.scrypt(token.encode(), salt=b"dtfm run authority", n=1 << 14, r=8, p=1, dklen=32)
