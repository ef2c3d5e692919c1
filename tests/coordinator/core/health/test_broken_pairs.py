"""Two nodes that cannot reach each other are kept apart after the first attempt, and nobody is left out, accused or sent home."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dtfm.coordinator.core.phases import Gathering, Stepping, Switching
from dtfm.coordinator.core.plan.planner_input import measured_cluster
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.health import LONGEST_PAUSE_LEASES
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.accused import goes_on_without, of_strangers, verdicts
from tests.coordinator.answers import links
from tests.coordinator.islands import alone_and_replicas
from tests.coordinator.script import LAYERS, LEASE, LONG, World, training


def lose(world: World, *losses: str) -> None:
    """The first of each pair of letters loses the second in the current step."""
    for node, peer in map(tuple, losses):
        world.fail_step(node, wire.PEER_LOST, peer=peer)
        if isinstance(world.state.phase, Switching):
            world.settle()


def in_one_stage(nodes: Iterable[str]) -> Plan:
    names = sorted(nodes)
    return from_routes(0, [Stage((0, LAYERS), tuple(names), ())], [([names[0]], 4)])


def no_link(node: str, peer: str) -> wire.NodeMessage:
    """What a node reports that does not reach the peer."""
    said = links(node, [peer])
    for link in said.links.links:
        link.bandwidth, link.problem = 0, "it does not answer"
    return said


def probes(world: World, node: str) -> int:
    return world.kinds_to(node).count("probe")


def pair_that_no_plan_does_without(world: World) -> World:
    """The planner finds no plan that keeps the two apart."""
    plan = world.planner
    world.planner = lambda ids: "no link" if ("a", "b") in world.state.ledger.reach.broken else plan(ids)
    return world


def test_the_pair_is_kept_apart_after_one_attempt_and_nobody_is_blamed() -> None:
    world = training(*"abcd", **LONG)
    lose(world, "ac")
    assert world.state.ledger.reach.broken == {("a", "c")}
    assert world.state.ledger.working == tuple("abcd")
    assert verdicts(world) == []
    assert world.events(ev.Suspected) == []
    goes_on_without(world)


def test_so_it_is_if_one_of_them_says_so_while_it_gets_ready_for_a_plan() -> None:
    """The second attempt fails while it connects."""
    world = World()
    world.join("a", "b", "c")
    one, other = world.plan_in_force.nodes[0], world.plan_in_force.nodes[-1]
    world.fail_plan(one, "it cannot be reached", peer=other)
    assert world.state.ledger.reach.broken == {tuple(sorted((one, other)))}
    assert world.state.ledger.working == tuple("abc")
    goes_on_without(world)


def test_and_if_it_could_not_fetch_its_state_from_there() -> None:
    world = training("a", "b", **LONG)
    world.step()
    world.join("c")
    world.step()
    world.apply()
    assert "c" in world.plan_in_force.nodes
    giver = next(name for layer in world.donors_to("c") for name in layer)
    world.fail_plan("c", "it sent nothing", peer=giver)
    assert world.state.ledger.reach.broken == {tuple(sorted(("c", giver)))}


def test_two_names_of_one_key_are_a_pair_as_any_other() -> None:
    """As two devices of one machine that cannot reach each other."""
    world = training(*"abcd", **LONG)
    world.belong_together("a", "b")
    lose(world, "ab")
    assert world.state.ledger.reach.broken == {("a", "b")}


def test_liars_who_name_others_keep_only_themselves_away_from_them() -> None:
    world = of_strangers(*"abcdkl")
    lose(world, "ka", "la", "kb", "lb")
    assert {"a", "b", "c", "d"} <= set(world.state.ledger.working)
    assert world.state.ledger.reach.broken <= {tuple(sorted(p)) for p in ("ka", "la", "kb", "lb")}
    assert verdicts(world) == []


def test_who_names_one_after_the_other_is_left_out_itself() -> None:
    world = training(*"abcdef", **LONG)
    lose(world, "ab", "ac", "ad")
    assert world.state.ledger.working == tuple("bcdef")
    assert "its own connection may be at fault" in world.state.ledger.health["a"].why
    assert verdicts(world) == []


@pytest.mark.parametrize("peer", ["a", "nobody", ""])
def test_who_loses_one_with_which_it_exchanges_nothing_has_failed_itself(peer: str) -> None:
    world = training("a", "b", "c", **LONG)
    world.automatic_tests = False
    world.fail_step("a", wire.PEER_LOST, peer=peer)
    assert world.state.ledger.working == ("b", "c")
    goes_on_without(world)


def test_a_broken_pair_is_measured_again_after_a_lease_then_twice_the_pause_and_is_used_again() -> None:
    world = training(*"abcd", **LONG)
    lose(world, "ac")
    before = probes(world, "a")
    world.wait(0.9 * LEASE, beating="abcd")
    assert probes(world, "a") == before
    world.wait(0.2 * LEASE, beating="abcd")
    assert probes(world, "a") == before + 1
    world.wait(1.8 * LEASE, beating="abcd")
    assert probes(world, "a") == before + 1
    world.wait(0.4 * LEASE, beating="abcd")
    assert probes(world, "a") == before + 2
    world.hear("a", links("a", ["c"]))
    assert world.state.ledger.reach.broken == frozenset()


def test_pauses_grow_to_an_hour() -> None:
    world = training(*"abcd", **LONG)
    lose(world, "ac")
    for _ in range(12):
        due = world.state.members.retries["a", "c"].due
        world.now = due
        for node in "abcd":
            world.hear(node, heartbeat=wire.Heartbeat())
    assert world.state.members.retries["a", "c"].pause == LONGEST_PAUSE_LEASES * LEASE


def test_where_no_plan_does_without_the_pair_the_run_waits_says_which_link_would_help_and_tries_it_at_once() -> None:
    world = pair_that_no_plan_does_without(training("a", "b", **LONG))
    before = probes(world, "a")
    lose(world, "ab")
    assert isinstance(world.state.phase, Gathering)
    assert world.exit_code is None
    said = world.events(ev.Waiting)[-1].reason
    assert "a link that works would help between a and b" in said
    assert probes(world, "a") == before + 1
    world.hear("a", links("a", ["b"]))
    assert isinstance(world.state.phase, Switching)
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_two_nodes_alone_try_again_and_again_and_the_run_never_fails() -> None:
    world = pair_that_no_plan_does_without(training("a", "b", **LONG))
    for _ in range(6):
        lose(world, "ab")
        assert isinstance(world.state.phase, Gathering)
        while ("a", "b") in world.state.ledger.reach.broken:
            before = probes(world, "a")
            world.wait(LEASE, beating="ab")
            if probes(world, "a") > before or world.state.members.sessions["a"].to_measure:
                world.hear("a", links("a", ["b"]))
        world.settle()
    assert world.exit_code is None
    assert verdicts(world) == []
    goes_on_without(world)


def test_a_pair_that_breaks_while_it_trains_goes_on_over_a_relay_and_its_line_is_in_the_plans_price() -> None:
    world = pair_that_no_plan_does_without(training("a", "b", **LONG))
    world.greet("r", relay=wire.Hello.ONLY)
    lose(world, "ab")
    assert isinstance(world.state.phase, Gathering)
    for way in ("direct", "dial-back", "relay r"):
        assert ("a", "b") in world.state.ledger.reach.broken, way
        assert world.kinds_to("a")[-1] == "probe", way
        world.hear("a", links("a", ["b"]) if way == "relay r" else no_link("a", "b"))
    assert world.state.ledger.reach.ways["a"]["b"].name == world.state.ledger.reach.ways["b"]["a"].name == "relay r"
    cluster = measured_cluster(world.state.ledger, ["a", "b"])
    assert [line.id for line in cluster.lines] == ["r"]
    assert cluster.via is not None
    assert cluster.via.tolist() == [[-1, 2], [2, -1]]
    world.settle()
    goes_on_without(world)


def test_what_others_say_of_one_that_is_gone_is_forgotten() -> None:
    world = training(*"abcd", **LONG)
    lose(world, "ac")
    world.lose("c")
    assert world.state.ledger.reach.broken == frozenset()
    world.settle()
    goes_on_without(world, "c")


def test_of_an_island_whose_replicas_lose_each_other_the_one_that_says_so_goes_on() -> None:
    """The other may be dead, and only these two have the island's state."""
    for says_so, other in ("bc", "cb"):
        world = alone_and_replicas("a", "b", "c")
        world.now += 0.1
        world.fail_step(says_so, wire.PEER_LOST, peer=other)
        assert world.plan_in_force.nodes == ("a", says_so)
        world.lose(other)
        world.settle()
        assert not world.state.ledger.training.began, "no island begins anew"
