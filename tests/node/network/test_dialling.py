"""Whom a node dials, and how much."""

from __future__ import annotations

from ipaddress import ip_network

from dtfm.node.network.dialling import Dialler
from dtfm.protos.identity.credentials import certified_name
from tests.node.dialling import peer
from tests.protos.members import member

AT_HOME = peer("b", "192.168.1.2:7401", "198.51.100.2:7401")


def test_a_peer_is_dialled_at_all_its_candidates() -> None:
    assert Dialler(member("a")).target(AT_HOME) == "ipv4:192.168.1.2:7401,198.51.100.2:7401"


def test_a_peer_of_the_same_network_is_dialled_there_first() -> None:
    opened = peer("b", "198.51.100.2:7401", "10.0.0.2:7401", "192.168.1.2:7401")  # the router's port first
    near = [ip_network("192.168.1.0/24"), ip_network("fd00::/64")]
    assert Dialler(member("a"), near=near).target(opened) == ("ipv4:192.168.1.2:7401,198.51.100.2:7401,10.0.0.2:7401")
    elsewhere = [ip_network("192.168.7.0/24")]
    assert Dialler(member("a"), near=elsewhere).target(opened) == Dialler(member("a")).target(opened)


def test_a_peer_that_cannot_be_dialled_is_asked_for_by_name_and_so_is_one_without_candidates() -> None:
    dialler = Dialler(member("a"), indirect={"b"}, loopback=False)
    assert dialler.target(AT_HOME) == f"{certified_name('b')}:443"
    assert dialler.target(peer("c")) == f"{certified_name('c')}:443"
    assert dialler.target(peer("c", "127.0.0.1:7401")) == f"{certified_name('c')}:443"


def test_a_direct_way_is_called_after_where_the_peer_saw_this_node() -> None:
    dialler = Dialler(member("a"), indirect={"b"})
    c = peer("c", "192.168.1.4:7401")
    assert dialler.way(c, "ipv4:192.168.1.3:50000") == "lan"
    assert dialler.way(c, "ipv4:198.51.100.3:50000") == "public"
    assert dialler.way(c, "ipv4:192.168.1.4:50000") == "loopback", "who comes from its address is on its machine"
    assert dialler.way(AT_HOME, "ipv4:127.0.0.1:50000") == "", "what a lent connection looks like says nothing"
    assert dialler.way(c, "somewhere") == ""
