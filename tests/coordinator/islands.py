"""A world whose nodes train as islands."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import count
from typing import Any

from dtfm.coordinator.core.state.state import State
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


def first_alone(nodes: Iterable[str]) -> Plan:
    first, *others = sorted(nodes)
    alone = from_routes(0, [Stage((0, LAYERS), (first,), (), island=0)], [((first,), 4 - len(others))])
    stage = Stage((0, LAYERS), tuple(others), (), island=1)
    return joined([alone, from_routes(0, [stage], [((other,), 1) for other in others])], 0)


def islands(*nodes: str, **changes: dict[str, Any]) -> World:
    """A world where these nodes compute step 1 of a run with rounds. The test decides the reports of standbys."""
    return _begun(World(fresh(nodes, changes), first_and_others), nodes)


def alone_and_replicas(*nodes: str, **changes: dict[str, Any]) -> World:
    """The same, where the first node is an island, and the others are the replicas of the only stage of another."""
    return _begun(World(fresh(nodes, changes), first_alone), nodes)


def each_alone(*nodes: str, **changes: dict[str, Any]) -> World:
    """The same, where each node is an island of its own."""
    return _begun(EachAlone(fresh(nodes, changes)), nodes)


class EachAlone(World):
    """Each node is an island, with the number that it had."""

    def __init__(self, state: State) -> None:
        super().__init__(state, self._each_alone)

    def _each_alone(self, nodes: Iterable[str]) -> Plan:
        known = self.state.ledger.training.islands
        free = (number for number in count() if number not in known.values())
        numbered = sorted((known[node] if node in known else next(free), node) for node in sorted(nodes))
        shares = [4 - len(numbered) + 1, *[1] * (len(numbered) - 1)]
        alone = [
            from_routes(0, [Stage((0, LAYERS), (node,), (), island=number)], [((node,), share)])
            for (number, node), share in zip(numbered, shares, strict=True)
        ]
        return joined(alone, 0)


def fresh(nodes: Collection[str], changes: dict[str, Any]) -> State:
    rounds = {"rounds": ROUNDS, "steps": 12, "evaluate_every": 0}
    cluster = {"nodes": len(nodes), "stages": "auto"}
    return fresh_state(**{"train": rounds, "cluster": cluster, **changes})


def _begun(world: World, nodes: Collection[str]) -> World:
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
