"""A world whose nodes train as islands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dtfm.scheduler.model.plan import Plan, Stage, from_routes, joined
from tests.coordinator.script import LAYERS, World, fresh_state, two_stages

ROUNDS = 2


def first_and_others(nodes: Iterable[str]) -> Plan:
    """Two nodes are two stages of one island. Each of the others is an island of its own, with one micro-batch."""
    first, second, *others = sorted(nodes)
    alone = [
        from_routes(0, [Stage((0, LAYERS), (node,), (), island=number)], [((node,), 1)])
        for number, node in enumerate(others, 1)
    ]
    return joined([two_stages([first, second], 4 - len(alone)), *alone], 0)


def islands(*nodes: str, **changes: dict[str, Any]) -> World:
    """A world in which these nodes compute step 1 of a run with rounds. What standbys report is the test's."""
    rounds = {"rounds": ROUNDS, "steps": 12, "evaluate_every": 0}
    cluster = {"nodes": len(nodes), "stages": "auto"}
    world = World(fresh_state(train=rounds, cluster=cluster, **changes), first_and_others)
    world.join(*nodes)
    world.settle()
    world.automatic_standbys = False
    return world


def exchange(world: World) -> None:
    """The steps until the next exchange, and that one's votes."""
    while world.state.ledger.training.step % (ROUNDS + 1) != ROUNDS:
        world.step()
    for node in world.plan_in_force.nodes:
        world.vote(node, samples=0, loss_sum=0.0)
