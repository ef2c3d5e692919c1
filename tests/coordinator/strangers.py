"""Scripts of runs whose members are strangers: each node has a key of its own, and earns its standing by audits."""

from __future__ import annotations

from typing import Any

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Pausing
from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.trust.auditing import tell_standings
from dtfm.coordinator.log import events as ev
from dtfm.scheduler.schedule import schedule
from tests.coordinator.script import World, fresh_state, two_stages


def open_run(nodes: int, **changes: dict[str, Any]) -> State:
    """The state at the start of a run of strangers, with these changes of RUN."""
    cluster, trust = changes.pop("cluster", {}), changes.pop("trust", {})
    return fresh_state(cluster={"nodes": nodes, **cluster}, trust={"mode": "open", **trust}, **changes)


def strangers(*nodes: str, planner: Any = two_stages, **changes: Any) -> World:
    """An open run where these nodes compute step 1."""
    world = World(open_run(len(nodes), **changes), planner)
    come(world, *nodes)
    world.settle()
    return world


def come(world: World, *nodes: str, **changes: Any) -> None:
    """These nodes join with keys of their own, and some fields of their Hellos changed."""
    for node in nodes:
        world.belong_together(node, key=f"the key of {node}")
    world.join(*nodes, **changes)


def audited(world: World, node: str, *clean: bool) -> list[ev.StandingChanged]:
    """This number of audits of the node's work ends in one tick. Returns the events about standings."""
    transition = t.Transition(world.state, world.now)
    step = world.state.ledger.training.step + 1
    for each in clean:
        transition.emit(ev.WorkAudited(step, world.state.ledger.training.generation, node, "another", 4, each, {}))
    tell_standings(transition)
    world.state, world.log = transition.state, [*world.log, *transition.entries]
    return [event for event in transition.entries if isinstance(event, ev.StandingChanged)]


class Planning(World):
    """A world where the scheduler itself plans."""

    def plan(self) -> None:
        wanted = self.wanted.pop(0)
        found = schedule(
            wanted.cluster(),
            wanted.workload,
            wanted.incumbent,
            stages=wanted.stages,
            evaluations=400,
            generation=wanted.generation,
        )
        self.feed(t.Planned(wanted.number, PlanChosen(found.plan, found.sentence, 1.0, 0.5, 0)))

    def switch(self) -> None:
        """A plan that was chosen is adopted after a step, and begins."""
        if self.state.planner.chosen is not None:
            self.step()
            self._begin()

    def _begin(self) -> None:
        if isinstance(self.state.phase, Pausing):
            self.apply()
            self.settle()

    def timed_step(self, speeds: dict[str, float], votes: dict[str, float] | None = None) -> None:
        """A step where each node computes as fast as its FLOP/s say (by default 1e10), and waits for the slowest node. ``votes``:
        FLOP/s of nodes that vote other times than they take."""
        assert self.state.ledger.described is not None
        layers = self.state.ledger.described.workload.layers
        seconds: dict[str, float] = {}
        for stage in self.plan_in_force.stages:
            work = 3 * sum(layer.forward_flops for layer in layers[slice(*stage.layers)])
            for node, load in zip(stage.replicas, stage.loads, strict=True):
                seconds[node] = work * load / speeds.get(node, 1e10)
        self.now += max(seconds.values())
        for node, computed in seconds.items():
            told = (votes or {}).get(node, speeds.get(node, 1e10)) / speeds.get(node, 1e10)
            self.vote(node, compute_seconds=computed / told)
        if (until := self.state.wakes_at) is not None:
            self.now = until
            self.feed(t.TimePassed())
        self._begin()

    def share_of(self, node: str) -> float:
        """The part of a step's FLOPs that the plan gives the node."""
        assert self.state.ledger.described is not None
        layers = self.state.ledger.described.workload.layers
        work = dict.fromkeys(self.plan_in_force.nodes, 0.0)
        for stage in self.plan_in_force.stages:
            for each, load in zip(stage.replicas, stage.loads, strict=True):
                work[each] = load * sum(layer.forward_flops for layer in layers[slice(*stage.layers)])
        return work.get(node, 0.0) / sum(work.values())
