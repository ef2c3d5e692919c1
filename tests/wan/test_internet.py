"""The small internet itself: who reaches whom."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.wan.internet import Internet

pytestmark = pytest.mark.usefixtures("internet")

SERVE = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
print("listening", flush=True)
while True:
    connection, caller = server.accept()
    connection.sendall(caller[0].encode())
    connection.close()
"""
"""Tells each caller the address that it comes from."""

CALL = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1) as connection:
    print(connection.recv(100).decode())
"""


@pytest.fixture(scope="module")
def net(internet: None) -> Iterator[Internet]:
    """Two public machines, and two homes with two and one machines in them."""
    with Internet() as net:
        net.host("public")
        net.host("other")
        net.router("home")
        net.host("a", behind="home")
        net.host("b", behind="home")
        net.router("elsewhere")
        net.host("c", behind="elsewhere")
        net.forward("elsewhere", 7401, "c")
        yield net


def serve(net: Internet, name: str, port: int) -> None:
    process = net.run(name, [sys.executable, "-c", SERVE, net.address(name), str(port)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    process.stdout.close()


def call(net: Internet, name: str, address: str, port: int) -> str:
    """The address that the server at ``address`` saw, when ``name`` called it; empty when there was no connection."""
    command = net.inside(name, [sys.executable, "-c", CALL, address, str(port)])
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()


def test_public_machines_reach_each_other(net: Internet) -> None:
    serve(net, "public", 7401)
    assert call(net, "other", net.address("public"), 7401) == net.address("other")


def test_a_machine_behind_a_router_reaches_out_under_the_routers_address(net: Internet) -> None:
    serve(net, "public", 7402)
    assert call(net, "a", net.address("public"), 7402) == net.address("home")


def test_a_machine_behind_a_router_is_not_reached_from_outside(net: Internet) -> None:
    serve(net, "a", 7403)
    assert call(net, "public", net.address("home"), 7403) == ""
    assert call(net, "public", net.address("a"), 7403) == ""
    assert call(net, "c", net.address("a"), 7403) == "", "its own network has the same addresses"


def test_machines_behind_one_router_reach_each_other(net: Internet) -> None:
    serve(net, "a", 7404)
    assert call(net, "b", net.address("a"), 7404) == net.address("b")


def test_a_forwarded_port_is_reached_from_outside(net: Internet) -> None:
    serve(net, "c", 7401)
    assert call(net, "public", net.address("elsewhere"), 7401) == net.address("public")
    assert call(net, "a", net.address("elsewhere"), 7401) == net.address("home")


def test_machines_with_ipv6_alone(net: Internet) -> None:
    net.host("six", ipv6_only=True)
    net.host("seven", ipv6_only=True)
    serve(net, "six", 7401)
    assert call(net, "seven", net.address("six"), 7401) == net.address("seven")


def test_a_machine_that_is_unplugged_is_silent(net: Internet) -> None:
    net.host("cut")
    serve(net, "cut", 7401)
    net.unplug("cut")
    assert call(net, "public", net.address("cut"), 7401) == ""
