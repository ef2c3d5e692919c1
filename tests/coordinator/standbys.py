"""Scripts of standbys that report when they are told to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LONG, World, training


def with_standbys(*standbys: str, trainers: str = "ab") -> World:
    """``trainers`` train two stages. The first of the idle ``standbys`` is a standby of the first stage, the next of the second,
    and so on in turn. They have caught up, and report nothing more by themselves."""
    world = training(*trainers, **LONG)
    world.stick_to_plan()
    world.join(*standbys)
    world.automatic_standbys = False
    return world


def without_reports(*nodes: str, steps: int = 20) -> World:
    """These nodes train. Nodes that are asked to be standbys report nothing by themselves."""
    world = training(*nodes, train={"steps": steps, "evaluate_every": 0})
    world.automatic_standbys = False
    return world


def caught_up(world: World, node: str, **changes: Any) -> None:
    """The standby has the state as of the last commit, and no gradients of the next step yet."""
    fields = {"number": world.last_to(node, "standby").number, "step": world.state.ledger.training.step, **changes}
    world.hear(node, standby_progress=wire.StandbyProgress(**fields))


def report(world: World, node: str, **changes: Any) -> None:
    """The standby has the state as of the last commit, and the gradients of the current step as voted in this generation."""
    caught_up(world, node, **{"voted": world.state.ledger.training.generation, **changes})


def share_a_machine(world: World, *nodes: str) -> None:
    """From now on these nodes have one key, and so does no other node."""
    for node in nodes:
        enrolled = ev.Enrolled(node, "node", f"the key of {' and '.join(nodes)}", "")
        world.log.append(enrolled)
        world.state = replace(world.state, ledger=enrolled.apply(world.state.ledger))


def layers_of(world: World, node: str) -> tuple[int, int]:
    """The layers that the node was last asked to copy as a standby."""
    asked = world.last_to(node, "standby")
    return asked.first_layer, asked.past_last_layer
