"""Who holds frozen layers with which digest, and who is told: `core/copies/frozen_layers.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from dtfm.coordinator.core.copies.frozen_layers import MOST_HOLDERS, offered
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan
from tests.coordinator.audit_scripts import replicas
from tests.coordinator.script import LAYERS, LONG, World, fresh_state, refusal_of

RIGHT, OTHER = b"packed".ljust(32), b"packed otherwise".ljust(32)


def switching(nodes: Iterable[str], mode: str = "trusted", **changes: dict[str, Any]) -> World:
    """The nodes are to take up their first plan: each holds all layers."""
    names = list(nodes)
    cluster = {"nodes": len(names), "stages": 1}
    world = World(fresh_state(**{**LONG, "cluster": cluster, "trust": {"mode": mode}, **changes}), planner=replicas)
    for node in names:
        world.belong_together(node, key=f"key of {node}")
    world.join(*names)
    return world


def frozen(digest: bytes, layers: Iterable[int] = range(LAYERS)) -> list[wire.FrozenLayer]:
    return [wire.FrozenLayer(layer=layer, digest=digest) for layer in layers]


def found(world: World) -> Mapping[int, tuple[bytes, list[str]]]:
    return {each.layer: (each.digest, list(each.nodes)) for each in offered(world.state)}


def test_newcomers_are_told_who_holds_which_layer() -> None:
    world = switching("ab")
    for node in "ab":
        world.plan_ready(node, frozen=frozen(RIGHT))
    world.join("c")
    named = world.last_to("c", "standby")
    assert [(each.layer, each.digest, list(each.nodes)) for each in named.frozen] == [
        (layer, RIGHT, ["a", "b"]) for layer in range(LAYERS)
    ]
    assert {"a", "b"} <= {peer.node for peer in named.peers}
    world.step()
    world.step()
    world.apply()
    assigned = world.last_to("c", "assignment")
    assert [each.layer for each in assigned.frozen] == list(range(LAYERS))
    assert {"a", "b"} <= {peer.node for peer in assigned.peers}


def test_a_node_that_has_left_is_named_to_nobody() -> None:
    world = switching("ab")
    for node in "ab":
        world.plan_ready(node, frozen=frozen(RIGHT))
    world.lose("a")
    assert found(world) == dict.fromkeys(range(LAYERS), (RIGHT, ["b"]))


@pytest.mark.parametrize(
    ("mode", "said", "believed"),
    [
        ("trusted", {"a": RIGHT}, RIGHT),
        ("trusted", {"a": RIGHT, "b": OTHER}, None),
        ("trusted", {"a": RIGHT, "b": OTHER, "c": RIGHT}, RIGHT),
        ("open", {"a": RIGHT}, None),
        ("open", {"a": RIGHT, "b": OTHER}, None),
        ("open", {"a": RIGHT, "b": RIGHT}, RIGHT),
        ("open", {"a": RIGHT, "b": OTHER, "c": RIGHT}, RIGHT),
    ],
)
def test_among_strangers_two_parties_must_name_a_digest_and_the_most_count(
    mode: str, said: Mapping[str, bytes], believed: bytes | None
) -> None:
    world = switching("abcd", mode)
    for node, digest in said.items():
        world.plan_ready(node, frozen=frozen(digest))
    holders = [node for node, digest in said.items() if digest == believed]
    assert found(world) == (dict.fromkeys(range(LAYERS), (believed, holders)) if believed else {})


def test_two_names_of_one_party_count_as_one() -> None:
    world = switching("abcd", "open")
    world.belong_together("a", "b")
    for node in "ab":
        world.plan_ready(node, frozen=frozen(RIGHT))
    assert found(world) == {}


def test_a_few_holders_are_named() -> None:
    names = [f"n{number:02}" for number in range(MOST_HOLDERS + 2)]
    world = switching(names)
    for node in names[:-1]:
        world.plan_ready(node, frozen=frozen(RIGHT))
    assert {len(nodes) for _, nodes in found(world).values()} == {MOST_HOLDERS}
    assert {node for _, nodes in found(world).values() for node in nodes} == set(names[:-1]), "others for other layers"


@pytest.mark.parametrize(
    "said",
    [frozen(RIGHT, [LAYERS]), frozen(RIGHT, [0, 0]), frozen(b"short")],
    ids=["not its own", "twice", "short"],
)
def test_what_is_no_report_of_its_layers_is_refused(said: list[wire.FrozenLayer]) -> None:
    world = switching("ab")
    stream = world.streams["a"]
    world.plan_ready("a", frozen=said)
    assert refusal_of(world, stream).reason == wire.MALFORMED
    assert found(world) == {}


def test_a_node_speaks_of_the_layers_of_its_stage_alone() -> None:
    def two(nodes: Iterable[str]) -> Plan:
        from tests.coordinator.script import two_stages

        return two_stages(sorted(nodes))

    world = World(fresh_state(**{**LONG, "cluster": {"nodes": 2, "stages": 2}}), planner=two)
    world.join("a", "b")
    stage = world.plan_in_force.stages[0]
    (node,) = stage.replicas
    stream = world.streams[node]
    world.plan_ready(node, frozen=frozen(RIGHT, range(*stage.layers)))
    assert set(found(world)) == set(range(*stage.layers))
    other = world.plan_in_force.stages[1].replicas[0]
    stream = world.streams[other]
    world.plan_ready(other, frozen=frozen(RIGHT, range(*stage.layers)))
    assert refusal_of(world, stream).reason == wire.MALFORMED
