"""Scripts of runs whose members are strangers: each node has a key of its own, and earns its standing by audits."""

from __future__ import annotations

from typing import Any

from dtfm.coordinator.core.earning import tell
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from tests.coordinator.script import World, fresh_state


def strangers(*nodes: str, **changes: dict[str, Any]) -> World:
    """An open run in which these nodes compute step 1."""
    changes = {**changes, "cluster": {"nodes": len(nodes), **changes.get("cluster", {})}}
    world = World(fresh_state(**{**changes, "trust": {"mode": "open", **changes.get("trust", {})}}))
    come(world, *nodes)
    world.settle()
    return world


def come(world: World, *nodes: str, **changes: Any) -> None:
    """These nodes join with keys of their own, and some fields of their Hellos changed."""
    for node in nodes:
        world.belong_together(node, key=f"the key of {node}")
    world.join(*nodes, **changes)


def audited(world: World, node: str, *clean: bool) -> list[ev.StandingChanged]:
    """In one tick so many audits of the node's work come to an end. Returns what is said of standings."""
    transition = Transition(world.state, world.now)
    step, key = world.state.ledger.step + 1, world.state.ledger.key_of(node)
    for each in clean:
        transition.emit(ev.WorkAudited(step, world.state.ledger.generation, node, "another", 4, each, {}, key))
    tell(transition)
    world.state, world.log = transition.state, [*world.log, *transition.entries]
    return [event for event in transition.entries if isinstance(event, ev.StandingChanged)]
