"""Where a node listens, and which of its addresses faces the coordinator."""

from __future__ import annotations

import pytest

from dtfm.node.network import place_on_the_net
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.enrolment import Entry
from dtfm.protos.identity.invitation import Invitation


@pytest.mark.parametrize(
    ("addresses", "facing", "behind_nat"),
    [
        (["127.0.0.1"], "127.0.0.1", False),
        (["127.0.0.1", "192.168.1.5"], "192.168.1.7", False),
        (["10.9.9.9", "192.168.1.5"], "192.168.1.7", False),
        (["192.168.1.5", "203.0.113.5"], "192.168.1.7", True),
    ],
    ids=["on loopback alone", "on loopback too", "elsewhere there is no way to", "behind NAT"],
)
def test_a_node_faces_its_coordinator_where_others_may_reach_them(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], facing: str, behind_nat: bool
) -> None:
    def faces(host: str) -> tuple[str, str]:
        if host.startswith("10."):
            raise OSError(f"{host} cannot be reached")
        return "127.0.0.1" if host == "127.0.0.1" else "192.168.1.7", host

    monkeypatch.setattr(place_on_the_net, "both_ends", faces)
    invitation = Invitation(tuple(f"{address}:7400" for address in addresses), bytes(32), "00" * 6, bytes(32))
    assert place_on_the_net.place_on_the_net(Entry(str(invitation), [Role.NODE], "n")) == (facing, behind_nat)


@pytest.mark.parametrize(
    ("address", "number", "nth"),
    [
        ("0.0.0.0:7500", 0, "0.0.0.0:7500"),
        ("0.0.0.0:7500", 2, "0.0.0.0:7502"),
        ("0.0.0.0:0", 2, "0.0.0.0:0"),
        ("[::]:7500", 1, "[::]:7501"),
        ("203.0.113.5", 1, "203.0.113.5"),
        ("2001:db8::1", 1, "2001:db8::1"),
        ("[2001:db8::1]", 1, "[2001:db8::1]"),
    ],
)
def test_each_of_several_nodes_has_a_port_of_its_own(address: str, number: int, nth: str) -> None:
    assert place_on_the_net.nth_port(address, number) == nth
