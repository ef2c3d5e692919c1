"""A call shows by a signed token who makes it; a forged, misdirected or old one is refused."""

from __future__ import annotations

import jwt
import pytest
from hypothesis import given, strategies as st

from dtfm.protos.identity.credentials import public_key, read_public_key
from dtfm.protos.identity.proof import (
    CLOCKS_APART,
    MOST_CHARACTERS,
    ClockError,
    ProofError,
    check_proof,
    claimed_name,
    proof,
)
from tests.protos.members import PIN, key_of

KEY = key_of("a")
PUBLIC = read_public_key(public_key(KEY))
NOW = 1_800_000_000.0
APART = CLOCKS_APART.total_seconds()


def token(key: bytes = KEY, pin: bytes = PIN, now: float = NOW) -> str:
    name, shown = claimed_name(proof(key, "a", pin, now))
    assert name == "a"
    return shown


@pytest.mark.parametrize("behind", [-APART, 0, APART])
def test_the_owner_of_the_key_is_believed_while_the_clocks_agree(behind: float) -> None:
    check_proof(token(now=NOW - behind), PUBLIC, PIN, NOW)


@pytest.mark.parametrize("shown", [token(key_of("b")), token(pin=bytes(32)), token()[:-8], "", "a.b.c"])
def test_another_key_or_another_authority_is_not(shown: str) -> None:
    with pytest.raises(ProofError, match="not made with the key"):
        check_proof(shown, PUBLIC, PIN, NOW)


def test_an_unsigned_token_is_not_believed() -> None:
    claims = {"sub": "a", "aud": PIN.hex(), "iat": int(NOW)}
    for forged in (
        jwt.encode(claims, "", algorithm="none"),
        jwt.encode(claims, public_key(KEY) + bytes(32), algorithm="HS256"),
        jwt.encode({"sub": "a", "aud": PIN.hex()}, KEY.decode(), algorithm="ES256"),
    ):
        with pytest.raises(ProofError):
            check_proof(forged, PUBLIC, PIN, NOW)


@pytest.mark.parametrize("behind", [-APART - 1, APART + 1])
def test_clocks_that_are_apart_are_both_named(behind: float) -> None:
    with pytest.raises(ClockError, match=r"your clock says 2027-01-15 .*, the coordinator's 2027-01-15 08:00:00 UTC"):
        check_proof(token(now=NOW - behind), PUBLIC, PIN, NOW)


@given(st.text(max_size=200))
def test_noise_shows_nobody(noise: str) -> None:
    for shown in (noise, f"Bearer {noise}"):
        with pytest.raises(ProofError):
            claimed_name((("authorization", shown),))


def test_what_is_missing_or_too_long_shows_nobody() -> None:
    for metadata in (
        None,
        (),
        (("authorization", b"Bearer"),),
        (("authorization", "Bearer " + "a" * MOST_CHARACTERS),),
    ):
        with pytest.raises(ProofError):
            claimed_name(metadata)
