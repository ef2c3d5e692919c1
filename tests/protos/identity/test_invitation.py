"""An invitation's text is read back as it was, and what is wrong with a damaged one is named."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dtfm.protos.identity.invitation import (
    ID_BYTES,
    MOST_CHARACTERS,
    PIN_BYTES,
    PREFIX,
    SECRET_BYTES,
    Invitation,
    invitation_in,
    new_secret,
    read_invitation,
)

hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9.-]{0,60}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda host: f"[{host}]"),
)
addresses = st.builds("{}:{}".format, hosts, st.integers(0, 65535))
invitations = st.builds(
    Invitation,
    addresses=st.lists(addresses, min_size=1, max_size=8).map(tuple),
    pin=st.binary(min_size=PIN_BYTES, max_size=PIN_BYTES),
    id=st.binary(min_size=ID_BYTES, max_size=ID_BYTES).map(bytes.hex),
    secret=st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
)
ONE = Invitation(("192.168.1.20:7400", "[fd00::1]:7400"), bytes(range(32)), "0123456789ab", bytes(32))


@given(invitations)
def test_every_invitation_is_read_back(invitation: Invitation) -> None:
    text = str(invitation)
    assert read_invitation(text) == invitation
    assert invitation_in(text) == text
    assert invitation_in(f"dtfm-node join {text}") == text
    assert len(text) <= MOST_CHARACTERS


@given(invitations, st.data())
def test_a_text_that_lost_its_end_is_called_truncated(invitation: Invitation, data: st.DataObject) -> None:
    text = str(invitation)
    kept = data.draw(st.integers(len(PREFIX), len(text) - 1))
    with pytest.raises(ValueError, match="this invitation is truncated: it has"):
        read_invitation(text[:kept])


@given(invitations, st.data())
def test_a_wrong_character_is_noticed(invitation: Invitation, data: st.DataObject) -> None:
    text = str(invitation)
    at = data.draw(st.integers(len(PREFIX), len(text) - 2))  # the last one may stand for fewer than six bits
    wrong = data.draw(st.sampled_from("Aa0_-!").filter(lambda c: c != text[at]))
    with pytest.raises(ValueError, match=r"mistyped|truncated"):
        read_invitation(text[:at] + wrong + text[at + 1 :])


@given(st.text(max_size=300))
def test_any_other_text_is_refused_in_a_sentence(text: str) -> None:
    for damaged in (text, PREFIX + text):
        with pytest.raises(ValueError, match=r"invitation"):
            read_invitation(damaged)


def test_line_breaks_of_a_mail_do_no_harm() -> None:
    text = str(ONE)
    assert read_invitation(f"  {text[:50]}\n  {text[50:]}\n") == ONE


def test_a_later_version_is_named() -> None:
    with pytest.raises(ValueError, match=r"of version 2, this dtfm reads 1; update"):
        read_invitation("dtfm2.abc")


def test_the_secret_is_in_no_log_and_never_the_same() -> None:
    assert "secret" not in repr(ONE)
    assert new_secret() != new_secret()


@pytest.mark.parametrize("bad", [(), ("nowhere",), ("a:1",) * 9])
def test_addresses_are_bounded(bad: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="address"):
        Invitation(bad, ONE.pin, ONE.id, ONE.secret)


@pytest.mark.parametrize(
    "text", ["127.0.0.1:7400", "dtfm.example.org:7400", "run.toml", "dtfm.txt", "./dtfm1.txt", "dtfm1.lan:7400"]
)
def test_addresses_and_files_are_not_taken_for_invitations(text: str) -> None:
    assert not invitation_in(text)
