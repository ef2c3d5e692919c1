"""What is heard on the local network is bounded, printable, and leads nowhere strange."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from zeroconf import DNSOutgoing, DNSQuestion

from dtfm.protos.candidates import read_candidate
from dtfm.protos.identity.invitation import MOST_ADDRESSES
from dtfm.protos.local_network.announcement import (
    MOST_CHARACTERS,
    MOST_FOUND,
    MOST_OF_ONE,
    SERVICE,
    Announcement,
    Found,
    announced_in,
    fingerprint,
    is_local,
    service,
)
from tests.protos.local_network.forged import IN, PIN, PTR, forged, packet

SOURCE = "192.168.1.2"
RUN = Announcement("stories", "llama, 1.1B parameters", PIN, ("192.168.1.2:7400", "[fd00::2]:7400"))


def said(announcement: Announcement) -> bytes:
    """What an honest coordinator sends."""
    told = service(announcement)
    return packet(told.dns_pointer(), told.dns_service(), told.dns_text(), *told.dns_addresses())


def test_what_a_coordinator_says_is_what_is_heard() -> None:
    assert announced_in(said(RUN), SOURCE) == [RUN]


def test_the_first_address_is_where_the_answer_comes_from() -> None:
    (heard,) = announced_in(forged(hosts=("192.168.1.77", SOURCE)), SOURCE)
    assert heard.addresses == (f"{SOURCE}:7400", "192.168.1.77:7400")


@pytest.mark.parametrize("source", ["203.0.113.9", "127.0.0.1", "100.64.0.1", "::1", "2001:db8::1", "fe80::1%2", ""])
def test_nothing_is_heard_of_who_is_not_on_a_local_network(source: str) -> None:
    assert announced_in(said(RUN), source) == []


def test_addresses_that_no_coordinator_has_are_left_out_and_few_are_kept() -> None:
    strange = (
        "127.0.0.1",
        "169.254.1.1",
        "224.0.0.251",
        "0.0.0.0",
        "8.8.4.4",
        "100.64.0.3",
        "::1",
        "2600::1",
        "fe80::1",
    )
    (heard,) = announced_in(forged(hosts=(*strange, "10.0.0.3")), SOURCE)
    assert heard.addresses == (f"{SOURCE}:7400", "10.0.0.3:7400")
    (many,) = announced_in(forged(hosts=tuple(f"192.168.1.{n}" for n in range(3, 40))), SOURCE)
    assert len(many.addresses) == MOST_ADDRESSES


@pytest.mark.parametrize("port", [0, 22, 80, 1023])
def test_a_port_of_a_well_known_service_is_not_believed(port: int) -> None:
    assert announced_in(forged(port=port), SOURCE) == []


@pytest.mark.parametrize(
    "authority", [b"", b"00", b"\xff" * 64, PIN.hex().encode() + b"00", bytes(32).hex().encode(), b"z" * 64]
)
def test_the_service_has_the_name_of_its_authority(authority: bytes) -> None:
    assert announced_in(forged(authority=authority), SOURCE) == []


@pytest.mark.parametrize("run", [b"\x1b[2Jgone", b"two\nlines", "\u202ereversed".encode(), b"\xff\xfe", b"x" * 250])
def test_a_name_is_printed_without_harm(run: bytes) -> None:
    (heard,) = announced_in(forged(run=run), SOURCE)
    assert heard.run.isprintable()
    assert len(heard.run) <= MOST_CHARACTERS


@pytest.mark.parametrize(
    "label", ["dtfm-", "dtfm-\x00001020304050607", "dtfm-zz01020304050607", "dtfm-\u202e01020304", "x"]
)
def test_a_name_that_no_coordinator_has_is_passed_over(label: str) -> None:
    assert announced_in(forged(label=label), SOURCE) == []


def test_a_goodbye_and_a_question_announce_nothing() -> None:
    assert announced_in(forged(ttl=0), SOURCE) == []
    question = DNSOutgoing(0)
    question.add_question(DNSQuestion(SERVICE, PTR, IN))
    assert announced_in(question.packets()[0], SOURCE) == []


@given(st.binary(max_size=1500), st.sampled_from([SOURCE, "fd00::2"]))
def test_no_packet_does_harm(data: bytes, source: str) -> None:
    check(announced_in(data, source))


@given(st.data())
def test_no_damaged_packet_does_harm(data: st.DataObject) -> None:
    whole = bytearray(said(RUN))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    check(announced_in(bytes(whole[: data.draw(st.integers(12, len(whole)))]), SOURCE))


@given(st.text(), st.text())
def test_any_name_fits_and_comes_through_printable(run: str, trains: str) -> None:
    (heard,) = announced_in(said(Announcement(run, trains, PIN, ("192.168.1.2:7400",))), SOURCE)
    check([heard])
    if run.isprintable() and run.isascii():
        assert heard.run == run[:MOST_CHARACTERS]


def check(heard: list[Announcement]) -> None:
    assert len(heard) <= MOST_FOUND
    for each in heard:
        assert each.run.isprintable()
        assert each.trains.isprintable()
        assert len(each.pin) == 32
        assert 1 <= len(each.addresses) <= MOST_ADDRESSES
        for address in each.addresses:
            ip, _ = read_candidate(address)
            assert is_local(str(ip))


def test_of_ten_thousand_announcements_a_few_are_kept_and_the_first_words_of_each() -> None:
    found = Found()
    for number in range(10_000):
        found.take(replace(RUN, run=f"{number}", pin=number.to_bytes(32, "big"), addresses=("192.168.1.66:7400",)))
    assert len(found.heard) == MOST_OF_ONE
    assert found.are_more
    found.take(RUN)
    found.take(replace(RUN, run="another", addresses=(*RUN.addresses, "192.168.1.66:7400")))
    assert found.heard["192.168.1.2", PIN] == RUN, "one liar leaves room"
    for number in range(10_000):
        found.take(replace(RUN, addresses=(f"192.168.{number // 250}.{number % 250}:7400",)))
    assert len(found.heard) == MOST_FOUND


def test_a_fingerprint_is_as_people_compare_it() -> None:
    assert fingerprint(PIN) == "0001 0203 0405 0607"


def test_names_are_no_local_addresses() -> None:
    assert not is_local(socket.gethostname())
    assert is_local("::ffff:192.168.1.2")
