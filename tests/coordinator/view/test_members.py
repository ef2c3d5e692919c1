"""The documents that show members."""

from __future__ import annotations

from typing import Any

from dtfm.coordinator.command.observe import _member_line
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.view.members import member_documents
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import links
from tests.coordinator.doors import Door
from tests.coordinator.script import LEASE, LONG, World, training

UNREACHED = "it does not answer"


def shown(world: World) -> dict[str, dict[str, Any]]:
    return {document["node"]: document for document in member_documents(world.view)}


def when(world: World, kind: type[ev.Event]) -> float:
    """The time of the last event of this kind."""
    return [record.time for record in world.records if isinstance(record.event, kind)][-1]


def no_link(node: str, other: str) -> wire.NodeMessage:
    said = links(node, [other])
    for link in said.links.links:
        link.bandwidth, link.problem = 0, UNREACHED
    return said


def test_a_member_document_says_what_the_node_computes() -> None:
    world = training("a", "b")
    world.join("c")
    seen = shown(world)
    assert (seen["a"]["status"], seen["a"]["stage"], seen["a"]["layers"]) == ("computing", 0, [0, 2])
    assert (seen["c"]["status"], seen["c"]["stage"]) == ("idle", None)
    assert seen["a"]["links"]["b"] == {"latency_seconds": 0.001, "bandwidth": 1e9, "way": "", "codecs": {}}
    assert seen["a"]["apart"] == []
    assert seen["a"]["health"] == {
        "works": True,
        "problem": "",
        "reason": "",
        "failures": 0,
        "since": None,
        "tried_again": None,
    }


def test_every_document_has_the_same_keys() -> None:
    world = training("a", "b", "c", **LONG)
    world.step()
    Door(world).expel("b")
    assert len({frozenset(document) for document in shown(world).values()}) == 1


def test_of_a_node_that_is_out_of_use_it_says_since_when_why_and_when_it_is_tested() -> None:
    world = training(*"abcd", **LONG)
    world.automatic_tests = False
    world.fail_step("a", wire.INTERNAL)
    began = when(world, ev.NodeOutOfUse)
    assert shown(world)["a"]["health"] == {
        "works": False,
        "problem": "INTERNAL",
        "reason": world.state.ledger.health["a"].why,
        "failures": 1,
        "since": began,
        "tried_again": began + LEASE,
    }
    line = _member_line(shown(world)["a"])
    assert "; out of use since " in line
    assert line.endswith("scripted")
    world.settle()
    world.wait(5 * LEASE, beating="abcd")  # it does not answer the test
    again = shown(world)["a"]["health"]
    assert (again["since"], again["failures"]) == (began, 2)
    assert again["tried_again"] == when(world, ev.NodeOutOfUse) + 2 * LEASE


def test_a_node_that_has_passed_its_test_works_and_what_failed_is_still_known() -> None:
    world = training(*"abcd", **LONG)
    world.automatic_tests = False
    world.fail_step("a", wire.INTERNAL)
    world.settle()
    world.wait(1.5 * LEASE, beating="abcd")
    world.hear("a", timed=wire.Timed(flops=1e11))
    health = shown(world)["a"]["health"]
    assert (health["works"], health["since"], health["tried_again"]) == (True, None, None)
    assert (health["problem"], health["failures"]) == ("INTERNAL", 1)


def test_of_a_pair_that_does_not_work_both_say_since_when_why_and_when_it_is_tried_again() -> None:
    world = training(*"abcd", **LONG)
    world.fail_step("a", wire.PEER_LOST, peer="c", sentence=UNREACHED)
    world.settle()
    began = when(world, ev.LinksMeasured)
    for node, other in ("ac", "ca"):
        (apart,) = shown(world)[node]["apart"]
        assert UNREACHED in apart.pop("reason")
        assert apart == {"node": other, "since": began, "tried_again": began + LEASE}
    assert "; no link with c since " in _member_line(shown(world)["a"])
    assert shown(world)["b"]["apart"] == []
    assert shown(world)["a"]["health"]["works"]
    world.wait(1.1 * LEASE, beating="abcd")
    world.hear("a", no_link("a", "c"))
    last, (apart,) = when(world, ev.LinksMeasured), shown(world)["a"]["apart"]
    assert apart["since"] == began
    assert apart["tried_again"] == last + (last - began) + LEASE, "pauses double"


def test_a_pair_that_works_again_is_apart_no_more() -> None:
    world = training(*"abcd", **LONG)
    world.fail_step("a", wire.PEER_LOST, peer="c")
    world.settle()
    world.wait(1.1 * LEASE, beating="abcd")
    world.hear("a", links("a", ["c"]))
    assert shown(world)["a"]["apart"] == shown(world)["c"]["apart"] == []
