"""Which addresses are dialled, and how they are tried side by side."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

import grpc.aio
import pytest

from dtfm.protos.candidates import MOST_CANDIDATES, origin_of, read_candidate, seen_at, target_of, way_to
from dtfm.protos.connection import open_channel, server_options
from dtfm.protos.identity.credentials import peer_credentials, to_peer
from tests.protos.members import member


@pytest.mark.parametrize(
    "text",
    [
        "169.254.169.254:8000",  # a cloud's metadata
        "[fe80::1]:7401",
        "[fec0::1]:7401",
        "224.0.0.1:7401",
        "[ff02::1]:7401",
        "0.0.0.0:7401",
        "0.1.2.3:7401",
        "[::]:7401",
        "255.255.255.255:7401",
        "240.0.0.1:7401",
        "[::ffff:169.254.169.254]:7401",
        "198.51.100.7:0",
        "198.51.100.7:22",
        "198.51.100.7:25",
        "198.51.100.7:70000",
        "home.example.org:7401",
        "198.51.100.7",
        "",
    ],
)
def test_addresses_that_no_node_has_are_not_dialled(text: str) -> None:
    with pytest.raises(ValueError, match=r"no candidate|not an address"):
        read_candidate(text)
    assert target_of([text], loopback=True) == ""


def test_loopback_is_dialled_only_where_the_run_is_on_it() -> None:
    assert target_of(["127.0.0.1:7401", "[::ffff:127.0.0.1]:7401"], loopback=False) == ""
    assert target_of(["127.0.0.1:7401"], loopback=True) == "ipv4:127.0.0.1:7401"


def test_a_target_has_one_family() -> None:
    mixed = target_of(["192.168.1.2:7401", "[2001:db8::1]:443"], loopback=False)
    assert mixed == "ipv6:[::ffff:192.168.1.2]:7401,[2001:db8::1]:443"


def test_more_candidates_than_allowed_are_left_out() -> None:
    many = [f"198.51.100.{number}:7401" for number in range(1, 100)]
    assert target_of(many, loopback=False).count(",") == MOST_CANDIDATES - 1


@pytest.mark.parametrize(
    ("peer", "way"),
    [
        ("ipv4:192.168.1.7:50000", "lan"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:50000", "lan"),
        ("ipv6:%5Bfd00::1%5D:50000", "lan"),
        ("ipv4:100.100.1.1:50000", "lan"),
        ("ipv4:198.51.100.7:50000", "public"),
        ("ipv6:%5B2001:db8::1%5D:50000", "public"),
        ("ipv4:127.0.0.1:50000", "loopback"),
    ],
)
def test_what_a_way_is_called(peer: str, way: str) -> None:
    address = seen_at(peer)
    assert address is not None
    assert way_to(address) == way


@pytest.mark.parametrize("peer", ["", "unix:/tmp/x", "ipv4:nonsense", "ipv6:%5B::1"])
def test_what_is_no_peer(peer: str) -> None:
    assert seen_at(peer) is None


@pytest.mark.parametrize("family", ["ipv4", "ipv4 and ipv6"])
async def test_silent_and_wrong_candidates_cost_a_moment_and_the_right_one_is_kept(family: str) -> None:
    right, wrong = (grpc.aio.server(options=server_options()) for _ in range(2))
    port = right.add_secure_port("127.0.0.1:0", peer_credentials(lambda: member("b")))
    other = wrong.add_secure_port("127.0.0.1:0", peer_credentials(lambda: member("c")))
    await right.start()
    await wrong.start()
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:  # takes connections, and says nothing
        quiet = silent.getsockname()[1]
        names = [f"127.0.0.1:{quiet}", f"127.0.0.1:{other}", f"127.0.0.1:{port}"]
        if family != "ipv4":
            names.insert(0, f"[2001:db8::1]:{port}")  # no route, or no answer
        async with open_channel(target_of(names, loopback=True), to_peer(member("a"), "b"), 10.0) as channel:
            await asyncio.wait_for(channel.channel_ready(), 5)
    await right.stop(None)
    await wrong.stop(None)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
    ],
)
def test_one_origin_is_an_address_or_a_household_of_ipv6(one: str, other: str, same: bool) -> None:
    assert (origin_of(ip_address(one)) == origin_of(ip_address(other))) == same
