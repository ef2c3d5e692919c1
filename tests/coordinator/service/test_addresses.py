"""The addresses in an invitation can be reached by others: `service/addresses.py`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.service import addresses
from dtfm.coordinator.service.addresses import public_addresses, usable

HOSTS = ["127.0.0.1", "::1", "192.168.1.20", "172.17.0.1", "fe80::1%eth0", "169.254.3.4", "fd00::20", "192.168.1.20"]


def test_addresses_that_only_this_machine_or_link_reaches_are_left_out() -> None:
    assert usable(HOSTS, ipv6=False) == ["192.168.1.20", "172.17.0.1"]
    assert usable(HOSTS, ipv6=True) == ["192.168.1.20", "172.17.0.1", "fd00::20"]


def test_a_server_on_all_interfaces_is_reached_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "own_hosts", lambda: HOSTS)
    assert public_addresses("0.0.0.0", 7400, []) == ("192.168.1.20:7400", "172.17.0.1:7400")
    assert public_addresses("::", 7400, [])[-1] == "[fd00::20]:7400"
    monkeypatch.setattr(addresses, "own_hosts", lambda: ["127.0.0.1"])
    assert public_addresses("0.0.0.0", 7400, []) == ("127.0.0.1:7400",)


def test_a_server_on_one_interface_is_reached_there_or_where_the_operator_says() -> None:
    assert public_addresses("10.0.0.1", 7400, []) == ("10.0.0.1:7400",)
    assert public_addresses("::1", 7400, []) == ("[::1]:7400",)
    assert public_addresses("0.0.0.0", 7400, ["example.org", "[2001:db8::1]:1"]) == (
        "example.org:7400",
        "[2001:db8::1]:1",
    )
    with pytest.raises(ValueError, match="the port must be a number"):
        public_addresses("0.0.0.0", 7400, ["example.org:port"])


def test_this_machines_own_are_addresses() -> None:
    assert "127.0.0.1" in addresses.own_hosts()
    usable(addresses.own_hosts(), ipv6=True)
