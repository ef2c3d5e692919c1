"""What a run names makes no node call its own machine or network: `data/reaching.py` and `network/inner.py`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

import pytest

from dtfm.node.data import reaching
from dtfm.node.data.allowed import EVERYTHING, read_allowed
from dtfm.node.data.problems import Withheld, in_full, sentence_of
from dtfm.node.model.causal.weight_files import WeightFiles
from dtfm.node.network.inner import is_inner


@dataclass
class Inner:
    """A web server of this machine. ``asked``: the paths."""

    port: int
    leads_to: str = ""
    """Where every request is redirected; empty: it is answered."""
    asked: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/weights"


@contextmanager
def inner_server() -> Iterator[Inner]:
    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            found.asked.append(self.path)
            self.send_response(302 if found.leads_to else 200)
            if found.leads_to:
                self.send_header("Location", found.leads_to)
            self.end_headers()
            if not found.leads_to and self.command == "GET":
                self.wfile.write(b"a secret")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        found = Inner(server.server_port)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield found
        finally:
            server.shutdown()


@pytest.fixture
def inner() -> Iterator[Inner]:
    with inner_server() as server:
        yield server


@pytest.fixture(autouse=True)
def no_leave() -> Iterator[None]:
    reaching.give_leave(())
    yield
    reaching.give_leave(())


def refusal(url: str) -> Withheld:
    with pytest.raises(Withheld) as refused:
        WeightFiles(url)
    return refused.value


def test_an_inner_server_gets_no_request_and_nobody_else_learns_that_it_is_there(inner: Inner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing:
        closed = closing.getsockname()[1]
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"):
        there, gone = [refusal(f"http://{host}:{port}/weights") for port in (inner.port, closed)]
        told = "model.pretrained: http://{}:{}/weights cannot be used from this node; its operator sees why"
        assert sentence_of(there) == told.format(host, inner.port)
        assert sentence_of(gone) == told.format(host, closed)
        assert f"--allow-data 'http://{host}:{inner.port}/weights'" in in_full(there)
    assert not inner.asked


def test_the_lender_may_name_an_inner_server_and_hears_alone_what_it_said(inner: Inner) -> None:
    for leave in (read_allowed([inner.url]), read_allowed(["http://127.0.0.1:*"]), EVERYTHING):
        reaching.give_leave(leave)
        inner.asked.clear()
        problem = refusal(inner.url)
        assert inner.asked
        assert "config.json is not JSON" in in_full(problem)
        assert sentence_of(problem).endswith("its operator sees why")


def test_a_redirection_leads_to_no_inner_server(inner: Inner) -> None:
    with inner_server() as other:
        inner.leads_to = f"http://127.0.0.1:{other.port}/weights/config.json"
        reaching.give_leave([inner.url])
        problem = refusal(inner.url)
        assert inner.asked
        assert not other.asked
        assert "this machine or its network" in in_full(problem)


def test_a_name_that_stands_for_something_else_by_the_time_of_the_call_leads_to_no_inner_server(
    inner: Inner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaching, "addresses_of", lambda _host, _port: frozenset({ip_address("1.1.1.1")}))
    problem = refusal(f"http://localhost:{inner.port}/weights")
    assert "this machine or its network" in in_full(problem)
    assert not inner.asked


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.9.1",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
        ),
        *("168.63.129.16", "192.0.0.192", "100.100.100.200", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1"),
        *("fd00:ec2::254", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "ff02::1", "5.6.7.8"),
    ],
)
def test_addresses_that_are_not_of_the_public_internet(address: str) -> None:
    assert is_inner(ip_address(address), own=[ip_address("5.6.7.8")])


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_addresses_of_the_public_internet(address: str) -> None:
    assert not is_inner(ip_address(address), own=[ip_address("5.6.7.8")])
