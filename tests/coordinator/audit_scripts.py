"""Scripts of audits: worlds whose auditors answer as the test tells them to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dtfm.coordinator.core.phases import Pausing, Stepping
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.script import LAYERS, LONG, World, fresh_state


def replicas(nodes: Iterable[str]) -> Plan:
    """One stage, the four micro-batches dealt out."""
    names = sorted(nodes)
    ways = [(names[number % len(names)],) for number in range(4)]
    stage = Stage((0, LAYERS), tuple(names), ())
    return from_routes(0, [stage], [(way, ways.count(way)) for way in dict.fromkeys(ways)])


def squares(nodes: Iterable[str]) -> Plan:
    """Two stages of equal size, the micro-batches dealt out."""
    names = sorted(nodes)
    half = len(names) // 2
    groups = names[:half], names[half : 2 * half]
    stages = [Stage((0, 2), tuple(groups[0]), ()), Stage((2, LAYERS), tuple(groups[1]), ())]
    ways = [(groups[0][number % half], groups[1][number % half]) for number in range(4)]
    return from_routes(0, stages, [(way, ways.count(way)) for way in dict.fromkeys(ways)])


def auditing(
    *nodes: str,
    planner: Any = replicas,
    rate: float = 1.0,
    mode: str = "trusted",
    believed: str = "",
    one_key: str = "",
    **changes: Any,
) -> World:
    """A world whose nodes compute step 1, with auditors that answer as the test tells them to. ``believed``: the nodes whose word
    decides. ``one_key``: the nodes that share a key."""
    tables = {**LONG, **changes, "trust": {"audit_rate": rate, "mode": mode}, "cluster": {"nodes": len(nodes)}}
    world = World(fresh_state(**tables), planner)
    if mode == "open" or believed:
        for node in nodes:
            world.belong_together(node, key=f"key of {node}", believed=node in believed)
    world.belong_together(*one_key)
    world.join(*nodes)
    world.settle()
    world.automatic_audits = False
    return world


def all_vote(world: World, **changes: Any) -> None:
    for node in world.plan_in_force.nodes:
        world.vote(node, **changes)


def asked(world: World) -> dict[str, list[str]]:
    """By node whose work on the current step is repeated, the auditors that have not answered."""
    phase = world.state.phase
    return {audit.order.node: sorted(audit.awaited) for audit in phase.audits} if isinstance(phase, Stepping) else {}


def auditor_of(world: World, node: str) -> str:
    (by,) = asked(world)[node]
    return by


def asked_for(world: World, node: str) -> None:
    """Other audits are answered until this node's own work is being done again."""
    while not asked(world)[node] or world.last_to(auditor_of(world, node), "audit").node != node:
        other, by = next((of, by[0]) for of, by in asked(world).items() if of != node and by)
        assert world.last_to(by, "audit").node == other
        world.audit(by)


ASKED_IN_VAIN = {"withheld_by": "c", "problem": "WITHHELD"}
"""An auditor has another digest than c, and c hands out nothing to compare."""


def answer_all(world: World, of: str = "a", **about_it: Any) -> None:
    """All audits of the current step are answered: for this node's work as given, for other nodes that their work is right."""
    if not asked(world):
        all_vote(world)
    answer_each(world, lambda accused, _: about_it if accused == of else {})


def answer_each(world: World, answer: Callable[[str, str], dict[str, Any]]) -> None:
    """All audits of the current step are answered, as ``answer`` says for the audited node and its auditor."""
    step = world.state.ledger.training.step
    while world.state.ledger.training.step == step and isinstance(world.state.phase, Stepping) and asked(world):
        for accused, by in list(asked(world).items()):
            for node in by:
                if node in asked(world).get(accused, ()):
                    world.audit(node, **answer(accused, node))


def all_find_it_right(world: World) -> None:
    while any(by for by in asked(world).values()):
        for by in [node for nodes in asked(world).values() for node in nodes]:
            if "audit" in world.kinds_to(by):
                world.audit(by)


def all_find_it_right_in_one_step(world: World) -> None:
    all_vote(world)
    all_find_it_right(world)


def trains_again(world: World) -> None:
    """All plans that are adopted are taken up."""
    for _ in range(20):
        if isinstance(world.state.phase, Stepping):
            return
        if isinstance(world.state.phase, Pausing):
            world.apply()
        world.settle()
    raise AssertionError(f"no step begins: {world.log[-1]}")


def come_back(world: World, node: str) -> None:
    """It joins again, and has its part again."""
    world.automatic_audits = True
    trains_again(world)
    world.join(node)
    for _ in range(20):
        if node in world.plan_in_force.nodes and isinstance(world.state.phase, Stepping):
            return
        if isinstance(world.state.phase, Stepping):
            world.step()
        trains_again(world)
    raise AssertionError(f"{node} has no part: {world.log[-1]}")


def quarantined(world: World) -> list[tuple[str, Charge, bool]]:
    return [(event.node, event.charge, event.undecided) for event in world.events(ev.NodeQuarantined)]
