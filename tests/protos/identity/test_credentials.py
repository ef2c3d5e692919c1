"""Credentials over real connections: members reach each other, strangers reach nobody, nobody impersonates another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from dtfm.protos.connection import Way, channel_options, open_channel, server_options
from dtfm.protos.identity import credentials
from dtfm.protos.identity.credentials import (
    MOST_KEY_BYTES,
    Identity,
    certified_name,
    coordinator_credentials,
    fetch_authority,
    is_half_over,
    is_key,
    issue,
    make_authority,
    make_key,
    nobody,
    peer_credentials,
    public_key,
    read_public_key,
    shows_certificate,
    to_coordinator,
    to_peer,
)
from dtfm.protos.identity.proof import CLOCKS_APART, ClockError
from tests.protos.members import AUTHORITY, DAY, NOW, PIN, member

Context = grpc.aio.ServicerContext[bytes, bytes]


@asynccontextmanager
async def serving(credentials: grpc.ServerCredentials) -> AsyncIterator[str]:
    """The address of a server that answers whether the caller is the node that the request names."""

    async def who(request: bytes, context: Context) -> bytes:
        return b"yes" if shows_certificate(context.auth_context(), request.decode()) else b"no"

    server = grpc.aio.server(options=server_options())
    handlers: dict[str, Any] = {"Who": grpc.unary_unary_rpc_method_handler(who)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", handlers),))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(address: str, way: Way, who: str) -> bytes:
    async with open_channel(address, way, 5) as channel:
        call: Any = channel.unary_unary("/Test/Who")
        answer: bytes = await call(who.encode(), timeout=20)
        return answer


def peers_of(identity: Identity) -> grpc.ServerCredentials:
    return peer_credentials(lambda: identity)


async def is_refused(address: str, way: Way) -> bool:
    try:
        await ask(address, way, "")
    except grpc.aio.AioRpcError as refusal:
        return refusal.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_members_know_each_other_by_their_certificates_whatever_their_names_and_addresses() -> None:
    long_name = "a node / with an odd näme_" * 20
    async with serving(peers_of(member("b"))) as address:
        for node in ("a", long_name):
            assert await ask(address, to_peer(member(node), "b"), node) == b"yes"
            assert await ask(address, to_peer(member(node), "b"), "another") == b"no"


async def test_a_strangers_certificate_is_refused_by_servers_and_by_callers() -> None:
    other_run = make_authority(make_key(), NOW)
    stranger = replace(member("a", other_run), authority=AUTHORITY.certificate)
    async with serving(peers_of(member("b"))) as address:
        assert await is_refused(address, to_peer(stranger, "b"))
    async with serving(peers_of(replace(member("b", other_run), authority=AUTHORITY.certificate))) as address:
        assert await is_refused(address, to_peer(member("a"), "b"))


async def test_a_caller_without_certificate_or_tls_is_refused() -> None:
    async with serving(peers_of(member("b"))) as address:
        _, options = to_peer(member("a"), "b")
        assert await is_refused(address, (grpc.ssl_channel_credentials(AUTHORITY.certificate), options))
        async with grpc.aio.insecure_channel(address, options=channel_options(5)) as channel:
            call: Any = channel.unary_unary("/Test/Who")
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await call(b"")


async def test_no_member_can_impersonate_another() -> None:
    async with serving(peers_of(member("c"))) as address:
        assert await is_refused(address, to_peer(member("a"), "b"))


async def test_a_member_cannot_act_as_the_authority() -> None:
    a = member("a")
    forged = Identity(
        AUTHORITY.certificate, issue(a, read_public_key(public_key(a.key)), "c", NOW) + a.certificate, a.key
    )
    async with serving(peers_of(member("b"))) as address:
        assert await is_refused(address, to_peer(forged, "b"))


async def test_an_expired_certificate_is_refused_and_one_from_a_clock_a_little_ahead_is_not() -> None:
    now = datetime.now(UTC)
    async with serving(peers_of(member("b"))) as address:
        assert await is_refused(address, to_peer(member("a", now=now - 2 * DAY), "b"))
        assert await is_refused(address, to_peer(member("a", now=now + 3 * CLOCKS_APART), "b"))
        assert await ask(address, to_peer(member("a", now=now + CLOCKS_APART), "b"), "a") == b"yes"


async def test_a_node_listens_before_it_is_certified_and_is_reached_from_then_on() -> None:
    shown = nobody()
    async with serving(peer_credentials(lambda: shown)) as address:
        assert await is_refused(address, to_peer(member("a"), "b"))
        shown = member("b")
        assert await ask(address, to_peer(member("a"), "b"), "a") == b"yes"
        other_run = make_authority(make_key(), NOW)
        shown = member("b", other_run)
        assert await ask(address, to_peer(member("a", other_run), "b"), "a") == b"yes"
        assert await is_refused(address, to_peer(member("a"), "b"))


async def test_a_joining_node_needs_only_addresses_and_the_pin_to_find_the_authority() -> None:
    async with serving(coordinator_credentials(AUTHORITY)) as address:
        found = await fetch_authority(["127.0.0.1:1", address], PIN, 10)
        assert found == (address, AUTHORITY.certificate)
        assert await ask(address, to_coordinator(found[1]), "anybody") == b"no"  # has no certificate yet
        with pytest.raises(PermissionError, match="is not the coordinator that was named"):
            await fetch_authority([address], bytes(32), 10)
        with pytest.raises(ConnectionError, match=r"^Connection refused$"):
            await fetch_authority(["127.0.0.1:1"], PIN, 10)
    with pytest.raises(ConnectionError, match=r"refused|failed"):
        await fetch_authority([address], PIN, 10)


async def test_the_authority_is_found_among_others_that_answer_too() -> None:
    async with (
        serving(coordinator_credentials(make_authority(make_key(), NOW))) as another,
        serving(coordinator_credentials(AUTHORITY)) as address,
    ):
        assert (await fetch_authority([another, address], PIN, 10))[0] == address


async def test_a_stranger_at_one_address_ends_no_search_while_the_coordinator_may_come_back_at_another() -> None:
    async with serving(coordinator_credentials(make_authority(make_key(), NOW))) as another:
        with pytest.raises(ConnectionError, match=r"127.0.0.1:1: .*; who answers at .* is not the coordinator"):
            await fetch_authority([another, "127.0.0.1:1"], PIN, 10)


@pytest.mark.parametrize("poser", [make_authority(make_key(), NOW), member("a")], ids=["stranger", "member"])
async def test_who_poses_as_the_coordinator_is_refused_even_with_a_certificate_of_the_run(poser: Identity) -> None:
    async with serving(coordinator_credentials(poser)) as address:
        with pytest.raises(PermissionError, match="somebody else answers there"):
            await fetch_authority([address], PIN, 10)
        assert await is_refused(address, to_coordinator(AUTHORITY.certificate))


async def test_a_server_that_accepts_and_stays_silent_times_out() -> None:
    open_ends = list[asyncio.StreamWriter]()
    silent = await asyncio.start_server(lambda _, writer: open_ends.append(writer), "127.0.0.1", 0)
    async with silent:
        with pytest.raises(ConnectionError, match="no answer within 0 s"):
            await fetch_authority([f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"], PIN, 0.2)
        open_ends[0].close()


async def test_a_clock_from_before_the_authoritys_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "datetime", LongAgo)
    async with serving(coordinator_credentials(AUTHORITY)) as address:
        with pytest.raises(ClockError, match=r"clock says 1970-01-01 .* good from 2024-01-01 to .*; set the clock"):
            await fetch_authority([address], PIN, 10)


class LongAgo(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> LongAgo:
        return cls(1970, 1, 1, tzinfo=tz)


def test_half_of_a_certificates_life() -> None:
    certificate = member("a").certificate
    assert not is_half_over(certificate, NOW + 0.4 * DAY)
    assert is_half_over(certificate, NOW + 0.6 * DAY)


def test_a_restarted_coordinator_is_the_same_authority() -> None:
    again = make_authority(AUTHORITY.key, NOW + DAY)
    a = member("a", again)
    x509.load_pem_x509_certificate(a.certificate).verify_directly_issued_by(
        x509.load_pem_x509_certificate(AUTHORITY.certificate)
    )


def other_public_key() -> bytes:
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize(
    "key", [b"", b"noise", make_key(), AUTHORITY.certificate, bytes(MOST_KEY_BYTES + 1), other_public_key()]
)
def test_what_is_no_public_key_on_p256_is_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="not a public key on P-256"):
        read_public_key(key)


def test_keys_are_told_from_other_files() -> None:
    assert is_key(make_key())
    assert not is_key(b"no key")
    assert not is_key(AUTHORITY.certificate)


def test_different_nodes_have_different_names_and_keys_stay_out_of_logs() -> None:
    assert certified_name("a") != certified_name("b")
    assert "PRIVATE" not in repr(AUTHORITY)
