"""Where a node may be reached, given the machine's interfaces, the environment and the owner's options."""

from __future__ import annotations

import pytest

from dtfm.node.network.addresses import Interface, candidates, identity_ports, interfaces, near
from dtfm.protos.candidates import MOST_CANDIDATES

HOME = (Interface("lo", "127.0.0.1"), Interface("eth0", "192.168.1.20"), Interface("eth0", "fe80::1"))
SIX = (*HOME, Interface("eth0", "2001:db8::20"))


def found(*interfaces: Interface, **options: object) -> tuple[str, ...]:
    fields = {"environment": {}, "host": "0.0.0.0", "port": 7401, **options}
    return tuple(candidates(found=lambda: interfaces, **fields))  # type: ignore[arg-type]


def test_a_home_pc_has_its_private_address() -> None:
    assert found(*HOME) == ("192.168.1.20:7401",)


def test_with_ipv6_it_has_two() -> None:
    assert found(*SIX) == ("192.168.1.20:7401", "[2001:db8::20]:7401")


def test_the_address_that_faces_the_coordinator_comes_first() -> None:
    two = (Interface("eth0", "10.0.0.5"), Interface("tun0", "10.8.0.5"))
    assert found(*two, facing="10.8.0.5") == ("10.8.0.5:7401", "10.0.0.5:7401")


def test_a_coordinator_on_this_machine_makes_it_all_loopback() -> None:
    assert found(*HOME, facing="127.0.0.1") == ("127.0.0.1:7401",)


def test_the_bridges_of_containers_do_not_count() -> None:
    assert found(Interface("docker0", "172.17.0.1"), Interface("br-1f", "172.18.0.1"), *HOME) == ("192.168.1.20:7401",)


def test_a_node_that_listens_on_one_address_has_that_one() -> None:
    two = (Interface("eth0", "10.0.0.5"), Interface("eth1", "198.51.100.5"))
    assert found(*two, host="198.51.100.5") == ("198.51.100.5:7401",)


def test_what_the_owner_gives_comes_first() -> None:
    given = ["198.51.100.7", "198.51.100.8:9000", "2001:db8::7", "[2001:db8::8]:9000"]
    wanted = ("198.51.100.7:7401", "198.51.100.8:9000", "[2001:db8::7]:7401", "[2001:db8::8]:9000")
    assert found(*HOME, advertise=given) == (*wanted, "192.168.1.20:7401")


@pytest.mark.parametrize("text", ["0.0.0.0", "169.254.169.254", "224.0.0.1", "198.51.100.7:22", "home.example.org"])
def test_an_address_that_peers_could_not_use_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no candidate"):
        found(*HOME, advertise=[text])


def test_vast_maps_a_port() -> None:
    vast = {"PUBLIC_IPADDR": "198.51.100.9", "VAST_TCP_PORT_7401": "41234"}
    inside = Interface("eth0", "172.17.0.2")
    assert found(inside, environment=vast) == ("198.51.100.9:41234", "172.17.0.2:7401")


def test_vast_maps_a_port_to_itself() -> None:
    vast = {"PUBLIC_IPADDR": "198.51.100.9", "VAST_TCP_PORT_70000": "41235", "VAST_TCP_PORT_70001": "41236"}
    assert identity_ports(vast) == (41235, 41236)
    assert found(environment=vast, port=41235) == ("198.51.100.9:41235",)


def test_some_instances_have_no_port_at_all() -> None:
    vast = {"PUBLIC_IPADDR": "198.51.100.9", "VAST_TCP_PORT_22": "40022"}
    assert identity_ports(vast) == ()
    assert found(environment=vast) == ()


def test_runpod_maps_a_port() -> None:
    runpod = {"RUNPOD_PUBLIC_IP": "198.51.100.10", "RUNPOD_TCP_PORT_7401": "10341"}
    assert found(environment=runpod) == ("198.51.100.10:10341",)


@pytest.mark.parametrize("port", ["", "none", "0", "70000", "-1", "41234; rm"])
def test_a_strange_environment_is_ignored(port: str) -> None:
    assert found(environment={"PUBLIC_IPADDR": "198.51.100.9", "VAST_TCP_PORT_7401": port}) == ()
    assert found(environment={"PUBLIC_IPADDR": "not an address", "VAST_TCP_PORT_7401": "41234"}) == ()


def test_there_are_never_more_than_peers_try() -> None:
    many = [Interface("eth0", f"10.0.0.{number}") for number in range(1, 50)]
    assert len(found(*many)) == MOST_CANDIDATES


def test_this_machine_has_an_interface() -> None:
    assert any(interface.address == "127.0.0.1" for interface in interfaces())


def test_near_are_the_private_networks_of_this_machine_without_those_of_its_containers() -> None:
    found = [
        Interface("lo", "127.0.0.1", 8),
        Interface("eth0", "192.168.1.20", 24),
        Interface("eth0", "fd00::20%2", 64),
        Interface("eth1", "203.0.113.20", 24),
        Interface("docker0", "172.17.0.1", 16),
        Interface("tailscale0", "100.64.0.3", 32),
        Interface("eth0", "fe80::1%2", 64),
    ]
    assert list(map(str, near(found))) == ["192.168.1.0/24", "fd00::/64", "100.64.0.3/32"]
