"""The emulated network, as processes see it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest

from dtfm.scheduler.model.cluster import Cluster, Node
from tests.cluster.launch import ROOT
from tests.wan.check import Probes, check, rounds
from tests.wan.wan import COORDINATOR, Wan

pytestmark = pytest.mark.usefixtures("emulation")
MBIT = 1e6 / 8
WAIT = [sys.executable, "-c", "import signal; signal.pause()"]


def network(latency_ms: list[list[float]], mbit: list[list[float]], up: list[float | None] | None = None) -> Cluster:
    nodes = tuple(
        Node(f"n{number}", 1e9, 1e9, up=None if limit is None else limit * MBIT)
        for number, limit in enumerate(up or [None] * len(mbit))
    )
    return Cluster(nodes, np.array(latency_ms) / 1e3, np.array(mbit) * MBIT)


UNEVEN = network(
    [[0, 10, 30], [20, 0, 5], [40, 5, 0]],
    [[0, 40, 15], [10, 0, 100], [20, 60, 0]],
)


@pytest.fixture(scope="module")
def wan(emulation: None) -> Iterator[Wan]:
    """Two nodes with a link of 20 ms and 50 Mbit/s, and a third one with such a link to the first only."""
    with Wan(network([[20] * 3] * 3, [[0, 50, 50], [50, 0, 0], [50, 0, 0]])) as up:
        yield up


@pytest.fixture(scope="module")
def probes(wan: Wan) -> Iterator[Probes]:
    with Probes(wan) as started:
        yield started


def ended(process: int, seconds: float = 10) -> bool:
    """Whether the process, which is no child of ours, ends within ``seconds``."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def test_every_direction_of_every_pair_has_its_own_latency_and_rate() -> None:
    with Wan(UNEVEN) as wan:
        findings = check(wan)
    assert [found for found in findings if not found.agrees] == []
    assert {(f.source, f.destination): round(f.rate / MBIT) for f in findings} == {
        ("n0", "n1"): 40,
        ("n1", "n0"): 10,
        ("n0", "n2"): 15,
        ("n2", "n0"): 20,
        ("n1", "n2"): 100,
        ("n2", "n1"): 60,
    }


def test_the_check_finds_a_link_that_is_not_as_the_file_says() -> None:
    with Wan(network([[0, 20], [20, 0]], [[0, 50], [50, 0]])) as wan:
        told = wan.link("n0", "n1")
        wan.set_link("n0", "n1", gbps=0.04)
        wan._links["n0", "n1"] = told
        assert [found.agrees for found in check(wan)] == [False, True]


def test_one_tcp_connection_gets_at_least_nine_tenths_of_its_link(probes: Probes) -> None:
    assert probes.connect(("n0", "n1"), seconds=3) / (50 * MBIT) == pytest.approx(0.95, abs=0.05)


def test_links_change_while_running(wan: Wan, probes: Probes) -> None:
    pair = ("n0", "n2")
    assert probes.echo([pair])[pair] == pytest.approx(0.040, abs=0.005)
    wan.set_link(*pair, latency_ms=60, gbps=0.02)
    assert probes.echo([pair])[pair] == pytest.approx(0.080, abs=0.005)
    assert probes.pour([pair])[pair] == pytest.approx(20 * MBIT, rel=0.05)
    wan.set_link(*pair, latency_ms=20, gbps=0.05)
    assert probes.echo([pair])[pair] == pytest.approx(0.040, abs=0.005)


def test_packets_are_lost_at_the_rate_asked_for(wan: Wan, probes: Probes) -> None:
    wan.set_link("n0", "n2", loss=0.2)
    assert probes.flood(("n0", "n2"), 1000) == pytest.approx(0.8, abs=0.05)
    wan.set_link("n0", "n2", loss=0.0)
    assert probes.flood(("n0", "n2"), 200) == 1


def test_nodes_without_a_link_do_not_reach_each_other_and_all_reach_the_coordinator(wan: Wan, probes: Probes) -> None:
    assert probes.flood(("n1", "n2"), 3) == 0
    assert wan.traffic()["n1", "n2"].dropped == 3
    pairs = [(name, COORDINATOR) for name in wan.network.ids]
    assert all(trip == pytest.approx(0.010, abs=0.004) for trip in probes.echo(pairs).values())


def test_a_nodes_uplink_limits_what_it_sends_to_all_others_together() -> None:
    with Wan(network([[5] * 3] * 3, [[40] * 3] * 3, up=[40, None, None])) as wan, Probes(wan) as probes:
        rates = probes.pour([("n0", "n1"), ("n0", "n2")])
        assert sum(rates.values()) == pytest.approx(40 * MBIT, rel=0.1)
        others = probes.pour([("n1", "n2"), ("n2", "n1")])
        assert all(rate == pytest.approx(40 * MBIT, rel=0.05) for rate in others.values())


def test_nothing_outside_is_reached_from_inside(wan: Wan) -> None:
    attempt = "import socket; s = socket.socket(); s.settimeout(2); print(s.connect_ex(('{}', 1)))"
    for address in ("10.78.0.1", "192.0.2.1"):
        process = wan.run("n0", [sys.executable, "-c", attempt.format(address)], stdout=subprocess.PIPE, text=True)
        assert os.strerror(int(process.communicate(timeout=20)[0])) == "Network is unreachable"


def test_two_networks_at_the_same_time_are_separate(wan: Wan, probes: Probes) -> None:
    with Wan(network([[0, 1], [1, 0]], [[0, 50], [50, 0]])) as other, Probes(other) as theirs:
        assert other.address("n0") == wan.address("n0")
        pair = ("n0", "n1")
        assert theirs.echo([pair])[pair] < 0.015 < probes.echo([pair])[pair]


def test_an_error_inside_takes_everything_down() -> None:
    pids: dict[str, int] = {}

    def fails() -> None:
        with Wan(UNEVEN) as wan:
            assert wan._emulator is not None
            pids.update(emulator=wan._emulator.pid, inside=wan.run("n0", WAIT).pid)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert [ended(pid, 0) for pid in pids.values()] == [True, True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_network_outlives_the_process_that_started_it(number: signal.Signals) -> None:
    script = f"""
        import signal, numpy
        from dtfm.scheduler.model.cluster import Cluster, Node
        from tests.wan.wan import Wan
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        with Wan(Cluster((Node("n0", 1, 1),), numpy.zeros((1, 1)), numpy.zeros((1, 1)))) as wan:
            print(wan._emulator.pid, wan.run("n0", {WAIT!r}).pid, flush=True)
            signal.pause()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        emulator, inside = (int(word) for word in owner.stdout.readline().split())
        owner.send_signal(number)
        owner.wait(20)
    try:
        assert ended(emulator)
        if number == signal.SIGINT:
            assert ended(inside)
    finally:
        if not ended(inside, 0):
            os.kill(inside, signal.SIGKILL)


def test_a_process_inside_is_the_one_that_was_started(wan: Wan) -> None:
    process = wan.run("n0", ["sh", "-c", "echo $$"], stdout=subprocess.PIPE, text=True)
    assert int(process.communicate(timeout=20)[0]) == process.pid


def test_no_node_may_be_named_coordinator() -> None:
    with pytest.raises(ValueError, match="'coordinator' is taken"):
        Wan(Cluster((Node(COORDINATOR, 1, 1),), np.zeros((1, 1)), np.zeros((1, 1))))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_rounds_hold_every_pair_once_and_each_node_once_per_round(count: int) -> None:
    names = tuple(f"n{number}" for number in range(count))
    everything = list(rounds(names))
    assert sorted(chain.from_iterable(everything)) == [(a, b) for a in names for b in names if a != b]
    for pairs in everything:
        sources = [source for source, _ in pairs]
        assert len(set(sources)) == len(sources)


def test_this_machines_own_network_is_untouched(wan: Wan) -> None:
    names = {name for _, name in socket.if_nameindex()}
    assert "wan0" not in names
