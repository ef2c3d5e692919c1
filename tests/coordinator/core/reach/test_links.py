"""The links that a node measures, and how they are recorded: `core/reach/links.py`."""

from __future__ import annotations

import math

import pytest

from dtfm.coordinator.core.reach import links as links_room
from dtfm.coordinator.core.state.session import Admission
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import links, reached
from tests.coordinator.script import LEASE, LONG, World, fresh_state, refusal_of, training, two_stages


def test_a_node_probes_all_that_prepared_before_it() -> None:
    world = World(fresh_state(cluster={"nodes": 4}))
    world.join("a", "b")
    world.greet("slow")
    world.prepare("c")
    probe = world.last_to("c", "probe")
    assert [peer.node for peer in probe.peers] == ["a", "b"]
    assert "c" not in world.state.ledger.ready
    world.hear("c", links("c", ["a", "b"]))
    world.wait(LEASE / 4)
    assert "c" in world.state.ledger.ready
    assert "c" in world.state.ledger.reach.links["a"]


def test_a_node_that_never_reports_its_links_becomes_ready_anyway() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a")
    world.prepare("b")
    world.wait(7 * LEASE, beating=["a", "b"])
    assert world.state.members.sessions["b"].admission is Admission.READY


def test_a_newcomer_does_not_wait_for_a_peer_that_has_left_and_come_back_nor_counts_what_it_says_of_the_old_one() -> (
    None
):
    world = World(fresh_state(cluster={"nodes": 4}))
    world.automatic_dialling = False
    world.join("a", "c")
    world.prepare("b")
    world.hear("a", reached("b", way="lan"))
    world.lose("c")
    world.join("c")
    failed = links("b", ["a", "c"])
    for link in failed.links.links[2:]:
        link.bandwidth, link.problem = 0.0, "the process that it measured is gone"
    world.hear("b", failed)
    world.wait(LEASE / 2, beating=["a", "b", "c"])
    assert "b" in world.state.ledger.ready
    assert world.state.ledger.reach.links["b"]["c"].bandwidth == 1e9, "as the new one has measured"
    assert world.state.ledger.reach.broken == frozenset()


FEW = 16


@pytest.fixture
def few_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that fewer nodes are many."""
    monkeypatch.setattr(links_room, "MOST_PROBED", FEW)


@pytest.mark.usefixtures("few_probed")
def test_a_newcomer_among_many_probes_some_of_them() -> None:
    world = World(fresh_state(cluster={"nodes": 1000}))
    names = [f"n{number:03d}" for number in range(3 * FEW)]
    probed: set[str] = set()
    for node in names:
        world.prepare(node)
        peers = [peer.node for message in world.heard_by(node) for peer in message.probe.peers]
        assert len(peers) == len(set(peers)) <= FEW
        probed.update(peers)
    assert len(probed) > 2 * FEW


@pytest.mark.usefixtures("few_probed")
def test_a_newcomer_among_many_probes_nodes_of_its_own_key_rather_than_others() -> None:
    world = World(fresh_state(cluster={"nodes": 1000}))
    beside = [f"mine{number}" for number in range(8)]
    world.belong_together(*beside)
    for node in [*beside[:-1], *(f"n{number:03d}" for number in range(3 * FEW)), beside[-1]]:
        world.prepare(node)

    def probed(node: str) -> set[str]:
        return {peer.node for message in world.heard_by(node) for peer in message.probe.peers}

    assert len(probed(beside[-1])) == FEW
    assert set(beside[:-1]) < probed(beside[-1])
    many = [f"theirs{number}" for number in range(2 * FEW)]
    world.belong_together(*many, key="another key")
    for node in many:
        world.prepare(node)
    assert len(probed(many[-1]) & set(many)) >= FEW // 2
    assert not probed(many[-1]) <= set(many)


def test_a_peer_that_hangs_does_not_keep_a_newcomer_waiting() -> None:
    world = World(fresh_state(cluster={"nodes": 4}))
    world.join("a", "hung")
    world.wait(LEASE * 0.6, beating=["a"])
    world.prepare("b")
    probes = [[peer.node for peer in message.probe.peers] for message in world.heard_by("b")[1:]]
    assert probes == [["a"], ["hung"]]
    world.hear("b", links("b", ["a"]))
    world.wait(LEASE / 4, beating=["a", "b"])
    assert "b" in world.state.ledger.ready


def test_a_broken_link_is_measured_again_ever_more_rarely_and_planned_with_once_it_works() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.planner = lambda ids: two_stages(["a", "b"])
    world.join("a", "b")
    world.automatic_dialling = False
    world.prepare("c")
    world.hear("a", reached("c"))
    world.hear("b", reached("c", problem="no route"))
    report = links("c", ["a", "b"])
    for link in report.links.links:
        if "b" in (link.source, link.destination):
            link.bandwidth, link.problem = 0, "no route"
    world.hear("c", report)
    world.settle()
    assert world.state.ledger.reach.broken == {("b", "c")}
    world.without_deadline()
    probed = []
    for _ in range(95):
        before = len(world.heard_by("b"))
        world.wait(LEASE, beating=["a", "b", "c"])
        probed.append(sum(m.WhichOneof("message") == "probe" for m in world.heard_by("b")[before:]))
    assert [seconds for seconds, count in enumerate(probed, 1) if count] == [1, 3, 7, 15, 31, 63]
    asked = world.state.planner.number
    world.hear("b", links("b", ["c"]))
    assert world.state.ledger.reach.broken == frozenset()
    assert world.state.planner.number == asked + 1


def test_a_link_that_breaks_again_soon_is_not_measured_as_often_as_one_that_breaks_first() -> None:
    """Otherwise two nodes that lose each other, and measure well, could repeat this forever."""
    world = training(*"abc", **LONG)
    lease = world.state.lease

    def breaks_until_it_is_measured() -> int:
        world.fail_step("a", wire.PEER_LOST, peer="b")
        world.settle()
        assert world.state.ledger.reach.broken == {("a", "b")}
        for leases in range(1000):
            before = len(world.heard_by("a"))
            world.wait(lease / 2, beating=["a", "b", "c"])
            world.wait(lease / 2, beating=["a", "b", "c"])
            if any(m.WhichOneof("message") == "probe" for m in world.heard_by("a")[before:]):
                world.hear("a", links("a", ["b"]))
                world.settle()
                assert world.state.ledger.reach.broken == frozenset()
                world.step()
                return leases
        raise AssertionError("it is never measured")

    first, second, third = (breaks_until_it_is_measured() for _ in range(3))
    assert first < second < third


def test_impossible_link_measurements_are_refused_and_cost_only_their_sender() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b")
    report = links("b", ["a"])
    report.links.links[0].bandwidth = math.inf
    stream = world.streams["b"]
    world.hear("b", report)
    assert refusal_of(world, stream).reason == wire.MALFORMED
    assert set(world.state.members.sessions) == {"a"}


def test_a_node_cannot_report_the_links_of_others() -> None:
    world = World(fresh_state(cluster={"nodes": 4}))
    world.join("a", "b", "c")
    world.hear("c", links("a", ["b"]))
    assert "c" not in world.state.members.sessions


def test_a_report_that_nobody_asked_for_changes_nothing() -> None:
    """Each link of a report may change ways, and the plan: unasked, a member could have the coordinator choose all day."""
    world = World(fresh_state(cluster={"nodes": 4}))
    world.join("a", "b", "c")
    before = world.state.ledger
    report = links("c", ["a", "b"])
    for link in report.links.links:
        link.bandwidth, link.problem = 0, "no answer"
    world.hear("c", report)
    assert world.state.ledger == before
    assert "c" in world.state.members.sessions, "it may have been asked before its stream broke"


def test_a_node_answers_each_time_that_it_is_asked_to_measure_and_once() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a")
    world.prepare("b")
    world.hear("b", links("b", ["a"]))
    again = links("b", ["a"])
    again.links.links[0].bandwidth = 1e3
    world.hear("b", again)
    assert world.state.ledger.reach.links["b"]["a"].bandwidth == 1e9


def test_a_report_that_names_a_link_twice_is_refused() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a")
    stream = world.prepare("b")
    world.hear("b", links("b", ["a"] * 1000))
    assert refusal_of(world, stream).reason == wire.MALFORMED
    assert world.events(ev.LinksMeasured) == []
