"""Nodes behind real NAT train together, exactly, each link by the way that is expected of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.cluster.exact import assert_exact
from tests.cluster.launch import Cluster
from tests.cluster.runs import run_file
from tests.wan.internet import Internet

pytestmark = [pytest.mark.usefixtures("internet", "nothing_left_running")]

COORDINATOR = "coordinator"
PORT = 7400
STEPS = 20


@dataclass(frozen=True, slots=True)
class Case:
    """Nodes with the home that each is behind (empty: public), and by (source, destination) the ways that are expected.
    ``asking``: those that ask their home's router to open a port, which takes three seconds, as these routers do not answer."""

    homes: dict[str, str]
    ways: dict[tuple[str, str], str]
    relays: Sequence[str] = ()
    forwarded: Sequence[str] = ()
    hairpin: bool = False
    asking: Sequence[str] = ()
    ipv6_only: bool = False


CASES = {
    "public to public": Case({"a": "", "b": ""}, {("a", "b"): "public", ("b", "a"): "public"}),
    "mapped port": Case({"a": "", "b": "home"}, {("a", "b"): "public", ("b", "a"): "public"}, forwarded=["b"]),
    "one behind NAT": Case({"a": "", "b": "home"}, {("a", "b"): "dial-back", ("b", "a"): "public"}),
    "the first behind NAT": Case({"a": "home", "b": ""}, {("a", "b"): "public", ("b", "a"): "dial-back"}),
    "behind different NATs": Case(
        {"a": "home", "b": "elsewhere"}, {("a", "b"): "relay r", ("b", "a"): "relay r"}, relays=["r"]
    ),
    "behind one NAT with mapped ports": Case(
        {"a": "home", "b": "home"}, {("a", "b"): "lan", ("b", "a"): "lan"}, forwarded=["a", "b"], hairpin=True
    ),
    "behind one NAT and outside": Case(
        {"a": "home", "b": "home", "c": ""},
        {
            ("a", "b"): "lan",
            ("b", "a"): "lan",
            ("a", "c"): "public",
            ("b", "c"): "public",
            ("c", "a"): "dial-back",
            ("c", "b"): "dial-back",
        },
        asking=["a"],
    ),
    "IPv6 alone": Case({"a": "", "b": ""}, {("a", "b"): "public", ("b", "a"): "public"}, ipv6_only=True),
}
IN_EVERY_RUN = ("behind different NATs",)


@contextmanager
def running(case: Case, folder: Path, **run: object) -> Iterator[tuple[Internet, Cluster]]:
    """The nodes of the case have joined, one after the other."""
    with Internet() as net:
        address = net.host(COORDINATOR, ipv6_only=case.ipv6_only)
        for relay in case.relays:
            net.host(relay)
        for home in sorted(set(case.homes.values()) - {""}):
            net.router(home)
        options: dict[str, list[str]] = {}
        for number, (name, home) in enumerate(case.homes.items()):
            net.host(name, behind=home, ipv6_only=case.ipv6_only)
            options[name] = [] if name in case.asking else ["--no-open-port"]
            if name in case.forwarded:
                net.forward(home, PORT + 1 + number, name, hairpin=case.hairpin)
                options[name] += ["--listen", f"0.0.0.0:{PORT + 1 + number}"]
                options[name] += ["--advertise", net.address(home)]
        toml = run_file(stages=[1] * len(case.homes), steps=STEPS, **run)  # type: ignore[arg-type]
        shown = f"[{address}]:{PORT}" if case.ipv6_only else f"{address}:{PORT}"
        with Cluster(folder, toml, address=shown, place=net.inside, invited=True) as cluster:
            for relay in case.relays:
                cluster.add_relay(relay)
                cluster.wait_for("node_joined", where=lambda e, relay=relay: e["node"] == relay)  # type: ignore[misc]
            for number, name in enumerate(case.homes, 1):
                cluster.add(name, *options[name])
                if number < len(case.homes):
                    cluster.wait_for("node_ready", where=lambda e, name=name: e["node"] == name)  # type: ignore[misc]
            yield net, cluster


def ways(cluster: Cluster) -> dict[tuple[str, str], str]:
    """By source and destination, the way as last reported or chosen."""
    found = {}
    for event in cluster.log():
        if event["event"] == "links_measured":
            found.update({(e["source"], e["destination"]): e["way"] for e in event["links"] if e["way"]})
        if event["event"] == "ways_chosen":
            names = {
                (e["source"], e["destination"]): f"relay {e['relay']}" if e["relay"] else e["way"]
                for e in event["ways"]
            }
            found.update(names)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.soak) for name in CASES]
)
def test_nodes_reach_each_other_and_train_exactly(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    with running(case, tmp_path) as (net, cluster):
        cluster.wait_for("step_committed")
        dialled = {host: net.connected_to(host) for host in case.homes if not case.ipv6_only}
        assert cluster.finish(150) == 0, cluster.coordinator.errors if cluster.coordinator else ""
        taken = ways(cluster)
        print("\n".join(f"{source} to {destination}: {way}" for (source, destination), way in sorted(taken.items())))
        assert taken == case.ways
        for source, destination in (link for link, way in case.ways.items() if way == "lan"):
            assert net.address(destination) in dialled[source]  # the private one
        assert_exact(cluster)


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["killed", "cut off"])
def test_a_run_goes_on_when_its_relay_is_gone_in_mid_step(tmp_path: Path, fault: str) -> None:
    two = replace(CASES["behind different NATs"], relays=("r", "s"))
    with running(two, tmp_path) as (net, cluster):
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        used = next(e["ways"][0]["relay"] for e in cluster.of("ways_chosen") if e["ways"][0]["relay"])
        gone = len(cluster.events)
        if fault == "killed":
            cluster.nodes[used].send(signal.SIGKILL)
        else:
            net.unplug(used)
        chosen = cluster.wait_for("ways_chosen", after=gone)
        assert {way["relay"] for way in chosen["ways"]} == {"r", "s"} - {used}
        cluster.wait_for("run_finished", timeout=100)
        cluster.nodes[used].send(signal.SIGKILL)  # cut off, it would wait for the coordinator
        assert cluster.finish(50) == 0
        assert_exact(cluster)


@pytest.mark.soak
def test_a_run_over_a_relay_goes_on_when_the_coordinator_is_started_again(tmp_path: Path) -> None:
    with running(CASES["behind different NATs"], tmp_path) as (_, cluster):
        cluster.wait_for("step_committed", where=lambda e: e["step"] == 5)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(10)
        cluster.start_coordinator()
        assert cluster.finish(150) == 0
        assert_exact(cluster)
