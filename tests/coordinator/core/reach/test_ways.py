"""How nodes are to reach each other, given who could dial whom."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dtfm.coordinator.core.plan.planner_input import measured_cluster
from dtfm.coordinator.core.reach.ways import NO_RELAY
from dtfm.coordinator.core.state.session import Admission
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.cluster import Line
from tests.coordinator.answers import links, reached
from tests.coordinator.script import LEASE, World, fresh_state, refusal_of, restarted


def world_with(*nodes: str, relays: Iterable[str] = ()) -> World:
    """These nodes are ready, and these relays are there. More nodes may come."""
    world = World(fresh_state(cluster={"nodes": max(len(nodes), 2)}))
    world.join(*nodes)
    for relay in relays:
        world.greet(relay, relay=wire.Hello.ONLY)
    world.automatic_dialling = False
    return world


def measured(node: str, *peers: str, way: str = "", problem: str = "") -> wire.NodeMessage:
    """What ``node`` measured: all links work, by this way; or none, for this reason."""
    said = links(node, peers)
    for link in said.links.links:
        link.way = way if link.source == node else ""
        if problem:
            link.bandwidth, link.problem = 0, problem
    return said


def comes(world: World, node: str, peer: str, *, dials: bool, is_dialled: bool, **hello: object) -> None:
    """A node joins that can dial the peer, and be dialled by it, or not."""
    world.prepare(node, **hello)
    world.hear(peer, reached(node, way="public" if is_dialled else "", problem="" if is_dialled else "no answer"))
    world.hear(node, measured(node, peer, way="public") if dials else measured(node, peer, problem="no answer"))


def ways_of(world: World, node: str) -> dict[str, str]:
    """How the node was last told to reach others: by node, the relay, or nothing for dial-back."""
    told = world.last_to(node, "ways") if "ways" in world.kinds_to(node) else wire.Ways()
    return {way.node: way.relay.node for way in told.ways}


def holders_of(world: World, node: str) -> list[str]:
    """To whom the node was last told to lend connections."""
    told = world.last_to(node, "ways") if "ways" in world.kinds_to(node) else wire.Ways()
    return [peer.node for peer in told.holders]


def admission(world: World, node: str) -> Admission:
    return world.state.members.sessions[node].admission


def way(world: World, source: str, destination: str) -> str:
    return world.state.ledger.reach.links[source][destination].way


def test_a_newcomer_is_dialled_by_those_whose_links_it_measures() -> None:
    world = world_with("a")
    world.prepare("b", candidates=["10.0.0.2:7000", "198.51.100.2:7000"])
    (asked,) = world.last_to("a", "reach").peers
    assert (asked.node, list(asked.candidates)) == ("b", ["10.0.0.2:7000", "198.51.100.2:7000"])


def test_it_is_planned_with_once_both_sides_have_spoken() -> None:
    world = world_with("a")
    world.prepare("b")
    world.hear("b", measured("b", "a", way="lan"))
    assert admission(world, "b") is Admission.PROBING
    world.hear("a", reached("b", way="public"))
    assert admission(world, "b") is Admission.READY
    assert (way(world, "b", "a"), way(world, "a", "b")) == ("lan", "public")
    assert ways_of(world, "a") == ways_of(world, "b") == {}


def test_a_node_that_never_answers_delays_it_no_longer_than_a_measurement_may_take() -> None:
    world = world_with("a")
    world.prepare("b")
    world.hear("b", measured("b", "a"))
    world.wait(6.5 * LEASE, beating=["a", "b"])
    assert admission(world, "b") is Admission.READY


def test_a_node_that_leaves_before_it_answers_does_not_delay_it() -> None:
    world = world_with("a", "c")
    world.prepare("b")
    world.hear("b", measured("b", "a", "c"))
    world.hear("c", reached("b"))
    world.lose("a")
    world.wait(LEASE / 10, beating=["b", "c"])
    assert admission(world, "b") is not Admission.PROBING


def test_a_newcomer_behind_nat_lends_to_those_that_cannot_dial_it() -> None:
    world = world_with("a")
    comes(world, "b", "a", dials=True, is_dialled=False)
    assert ways_of(world, "a") == {"b": ""}
    assert holders_of(world, "b") == ["a"]
    assert ways_of(world, "b") == {}
    assert way(world, "a", "b") == "dial-back"
    assert admission(world, "b") is Admission.READY, "it has measured the link in both directions"


def test_a_member_behind_nat_lends_to_a_newcomer_which_then_measures_that_way() -> None:
    world = world_with("a")
    comes(world, "b", "a", dials=False, is_dialled=True)
    assert ways_of(world, "b") == {"a": ""}
    assert holders_of(world, "a") == ["b"]
    assert admission(world, "b") is Admission.PROBING
    assert world.kinds_to("b")[-2:] == ["ways", "probe"]
    world.hear("b", links("b", ["a"]))
    assert admission(world, "b") is Admission.READY
    assert world.state.ledger.reach.broken == frozenset()
    assert way(world, "b", "a") == "dial-back"


def test_where_neither_can_dial_the_other_both_lend_to_a_relay() -> None:
    world = world_with("a", relays=["r"])
    comes(world, "b", "a", dials=False, is_dialled=False)
    assert (ways_of(world, "a"), ways_of(world, "b")) == ({"b": "r"}, {"a": "r"})
    assert (holders_of(world, "a"), holders_of(world, "b")) == (["r"], ["r"])
    world.hear("b", links("b", ["a"]))
    assert admission(world, "b") is Admission.READY
    assert (way(world, "a", "b"), way(world, "b", "a")) == ("relay r", "relay r")


def test_one_report_of_many_links_is_answered_at_once() -> None:
    """Not link by link: the ways of one node would be told to it as often as it has links."""
    world = world_with("a", "c", "d", relays=["r"])
    world.prepare("b")
    for node in ("a", "c", "d"):
        world.hear(node, reached("b", problem="no answer"))
    before = len(world.heard_by("b"))
    world.hear("b", measured("b", "a", "c", "d", problem="no answer"))
    assert world.kinds_to("b")[before:] == ["ways", "probe"]
    assert ways_of(world, "b") == dict.fromkeys(("a", "c", "d"), "r")
    assert [peer.node for peer in world.last_to("b", "probe").peers] == ["a", "c", "d"]


def test_a_node_that_was_not_asked_to_dial_another_is_ignored() -> None:
    world = world_with("a", relays=["r"])
    comes(world, "b", "a", dials=False, is_dialled=True)
    before = world.state.ledger
    world.hear("a", reached("b", problem="no answer"))
    assert world.state.ledger == before


def test_a_node_that_trains_may_relay_too() -> None:
    world = World(fresh_state(cluster={"nodes": 2}))
    world.join("a")
    world.join("c", relay=wire.Hello.ALSO)
    world.automatic_dialling = False
    world.prepare("b")
    world.hear("a", reached("b", problem="no answer"))
    world.hear("c", reached("b", problem="no answer"))
    said = measured("b", "a", problem="no answer")
    said.links.links.extend(measured("b", "c", way="public").links.links)
    world.hear("b", said)
    assert ways_of(world, "b") == {"a": "c"}
    assert holders_of(world, "b") == ["c"], "for the relay itself, and for a"


def test_a_relay_that_does_not_work_is_replaced_by_one_that_was_not_tried() -> None:
    world = world_with("a", relays=["r", "s"])
    comes(world, "b", "a", dials=False, is_dialled=False)
    world.hear("b", measured("b", "a", problem="the relay is unreachable"))
    assert ways_of(world, "b") == {"a": "s"}
    world.hear("b", measured("b", "a", problem="the relay is unreachable"))
    assert ways_of(world, "b") == {}
    assert world.state.ledger.reach.broken == {("a", "b")}
    assert world.state.ledger.reach.links["a"]["b"].problem == NO_RELAY
    assert admission(world, "b") is Admission.READY, "others may reach it"


def test_a_dial_back_that_does_not_work_is_replaced_by_a_relay() -> None:
    world = world_with("a", relays=["r"])
    comes(world, "b", "a", dials=False, is_dialled=True)
    world.hear("b", measured("b", "a", problem="no connection was lent"))
    assert ways_of(world, "b") == {"a": "r"}


def test_the_relay_with_the_least_to_do_is_chosen() -> None:
    world = world_with("a", relays=["r", "s"])
    comes(world, "b", "a", dials=False, is_dialled=False)
    world.hear("b", links("b", ["a"]))
    world.prepare("c")
    for node in ("a", "b"):
        world.hear(node, reached("c", problem="no answer"))
    world.hear("c", measured("c", "a", "b", problem="no answer"))
    assert sorted(ways_of(world, "c").values()) == ["r", "s"]


def test_a_relay_that_is_gone_is_replaced_at_once() -> None:
    world = world_with("a", relays=["r", "s"])
    comes(world, "b", "a", dials=False, is_dialled=False)
    world.hear("b", links("b", ["a"]))
    world.lose("r")
    assert (ways_of(world, "a"), ways_of(world, "b")) == ({"b": "s"}, {"a": "s"})
    assert (holders_of(world, "a"), holders_of(world, "b")) == (["s"], ["s"])
    (chosen,) = world.events(ev.WaysChosen)[-1:]
    assert {chosen.reason for chosen in chosen.ways} == {"relay r is gone"}


def test_without_another_relay_the_link_counts_as_broken_until_one_comes() -> None:
    world = world_with("a", relays=["r"])
    comes(world, "b", "a", dials=False, is_dialled=False)
    world.hear("b", links("b", ["a"]))
    world.lose("r")
    assert world.state.ledger.reach.broken == {("a", "b")}
    world.greet("s", relay=wire.Hello.ONLY)
    assert ways_of(world, "a") == {"b": "s"}
    assert world.kinds_to("a")[-2:] == ["ways", "probe"]
    world.hear("a", links("a", ["b"]))
    assert world.state.ledger.reach.broken == frozenset()


def test_a_relay_that_did_not_work_is_tried_again_after_a_while() -> None:
    world = world_with("a", relays=["r"])
    comes(world, "b", "a", dials=False, is_dialled=False)
    world.hear("b", measured("b", "a", problem="the relay is unreachable"))
    assert ways_of(world, "a") == {}
    world.wait(7 * LEASE, beating=["a", "b", "r"])
    assert ways_of(world, "a") == {"b": "r"}
    assert world.kinds_to("a")[-1] == "probe"


def test_a_node_that_left_is_no_longer_lent_connections() -> None:
    world = world_with("a")
    comes(world, "b", "a", dials=True, is_dialled=False)
    world.lose("a")
    assert holders_of(world, "b") == []


def test_the_ways_are_the_ways_in_the_log() -> None:
    world = world_with("a", relays=["r"])
    comes(world, "b", "a", dials=False, is_dialled=False)
    assert world.refolded().reach.ways == world.state.ledger.reach.ways
    assert restarted(world).state.ledger.reach.ways == {}, "nodes that return dial each other again"


def test_a_relay_is_no_node_to_plan_with() -> None:
    world = world_with("a", relays=["r"])
    world.automatic_dialling = True
    world.join("b")
    assert world.state.ledger.ready == ("a", "b")
    assert "probe" not in world.kinds_to("r")
    assert "r" not in [peer.node for peer in world.last_to("b", "probe").peers]


def test_a_relay_that_is_used_measures_its_connection_with_those_whom_others_can_dial() -> None:
    world = world_with("a", "public", relays=["r", "s"])
    world.prepare("b")
    world.hear("a", reached("b", problem="no answer"))
    world.hear("public", reached("b", problem="no answer"))
    said = measured("b", "a", problem="no answer")
    said.links.links.extend(measured("b", "public", way="public").links.links)
    world.hear("b", said)
    assert "probe" not in world.kinds_to("r"), "that would disturb the newcomer's measurements"
    world.hear("b", measured("b", "a"))
    (asked,) = world.last_to("r", "probe").peers
    assert asked.node == "public"
    assert "probe" not in world.kinds_to("s")

    said = measured("r", "public", way="public")
    said.links.up, said.links.down = 5e9, 6e9
    world.hear("r", said)
    cluster = measured_cluster(world.state.ledger, ["a", "b", "public"])
    assert cluster.lines == (Line("r", up=5e9, down=6e9),)
    assert cluster.via is not None
    assert cluster.via.tolist() == [[-1, 3, -1], [3, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("found", ["teleport", "dial-back", "x" * 10_000])
def test_an_impossible_way_is_refused(found: str) -> None:
    world = world_with("a")
    world.prepare("b")
    world.hear("a", reached("b", way=found))
    assert refusal_of(world, world.streams["a"]).reason == wire.MALFORMED


@pytest.mark.parametrize(
    ("said", "candidates"),
    [
        ({"candidates": []}, ()),
        ({"candidates": [], "port": 7401}, ("203.0.113.5:7401",)),
        ({"candidates": ["10.0.0.1:7401"], "port": 7401}, ("10.0.0.1:7401", "203.0.113.5:7401")),
        ({"candidates": ["203.0.113.5:7401"], "port": 7401}, ("203.0.113.5:7401",)),
        ({"candidates": [f"10.0.0.{n}:7401" for n in range(9)]}, None),
        ({"candidates": ["169.254.169.254:8000"]}, None),
        ({"candidates": [], "port": 1 << 20}, None),
        ({"candidates": [], "relay": 7}, None),
    ],
)
def test_where_the_coordinator_saw_a_node_is_one_more_candidate(
    said: dict[str, Any], candidates: tuple[str, ...] | None
) -> None:
    world = World(fresh_state())
    stream = world.greet("a", seen="203.0.113.5", **said)
    if candidates is None:
        assert refusal_of(world, stream).reason == wire.MALFORMED
    else:
        assert world.state.ledger.members["a"].candidates == candidates
