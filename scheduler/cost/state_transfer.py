"""The state that is transferred when one plan follows another, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtfm.scheduler.cost.room import Room, empty_room, roughly_freeing
from dtfm.scheduler.model.compiled import entry
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem
from dtfm.scheduler.model.sketch import Position


class Fetching(NamedTuple):
    """What the transfer of state costs, roughly and quickly, for compiled functions."""

    receive_before: Floats
    """float64 [nodes, layers + 1]: the seconds that node i needs to receive what it lacks of layers [0, k), if no other node
    fetches."""
    send_before: Floats
    """float64 [layers + 1]: the seconds that the holders of layers [0, k) need to send them once."""
    place: Ints
    """int64 [nodes]: the stage that the node holds, -1 for none."""
    cuts: Ints
    """Stage s holds the layers [cuts[s], cuts[s + 1])."""
    crossing: Floats
    """float64 [nodes, stages]: of what node i fetches of stage s, the share that comes from other machines."""
    weight: float
    """The seconds per step that a second of fetching costs until the next change of plan."""
    room: Room
    """What nodes hold, and how much memory they have."""
    freeing: float
    """Extra seconds that a change counts if some node has to free memory first."""


@entry(makes_arrays=True)
def fetching_seconds(fetching: Fetching, position: Position) -> float:
    """Seconds until all have fetched what they lack: the slowest receiver, or the holders of the stage that is wanted most. Nodes
    without room for their old stage and their new one free memory before that."""
    longest, freed = 0.0, -1.0
    sending = np.zeros(len(fetching.cuts))
    for node in range(len(position.place)):
        stage = position.place[node]
        if stage < 0:
            continue
        first, past_last = position.cuts[stage], position.cuts[stage + 1]
        freed = max(freed, roughly_freeing(fetching.room, node, first, past_last))
        receive = fetching.receive_before[node]
        longest = max(longest, receive[past_last] - receive[first])
        for held in range(len(fetching.cuts) - 1):
            low, high = max(first, fetching.cuts[held]), min(past_last, fetching.cuts[held + 1])
            if low < high and fetching.place[node] != held:
                sending[held] += fetching.crossing[node, held] * (
                    fetching.send_before[high] - fetching.send_before[low]
                )
    return float(max(longest, sending.max()) + (freed + fetching.freeing if freed >= 0 else 0.0))


def nothing_to_fetch(nodes: int, layers: int) -> Fetching:
    """Without an incumbent: no state has to move."""
    return Fetching(
        np.zeros((nodes, layers + 1)),
        np.zeros(layers + 1),
        np.full(nodes, -1),
        np.array([0, layers]),
        np.ones((nodes, 1)),
        0.0,
        empty_room(nodes, layers),
        0.0,
    )


class Fetch(NamedTuple):
    """What is fetched: by how many nodes, how many bytes, and the seconds until the last of them has its state."""

    nodes: int
    size: float
    seconds: float


class _Wanted(NamedTuple):
    """The layers that an island's nodes lack, the layers that each node can give, and the bytes of each layer."""

    lacks: NDArray[np.bool_]
    held: NDArray[np.bool_]
    layer_bytes: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Which node holds the state of which layer."""

    problem: Problem
    held: NDArray[np.bool_]
    """[nodes, layers]."""
    island: Ints
    """[nodes]: the number of the island whose state the node has, -1 if it has none."""
    with_rounds: bool = False
    """The islands have exchanged: a new island may begin with the state that all share."""
    with_moments: bool = False
    """A new island also gets moments."""

    @classmethod
    def of(cls, problem: Problem, plan: Plan, *, with_moments: bool = False) -> Holdings:
        """The state that nodes hold under ``plan``: none when the plan is for a model with another number of layers."""
        held = np.zeros((len(problem.flops), len(problem.activation)), dtype=bool)
        island = np.full(len(problem.flops), -1)
        for index, name in enumerate(problem.cluster.ids):
            stage = plan.stage_of(name)
            if stage is not None and plan.stages[-1].layers[1] == held.shape[1]:
                held[index, slice(*plan.stages[stage].layers)] = True
                island[index] = plan.stages[stage].island
        return cls(problem, held, island, plan.rounds.count > 0, with_moments)

    def lacking(self, groups: Groups, cuts: tuple[int, ...]) -> NDArray[np.bool_]:
        """The layers that each node must fetch for these stages: bool [nodes, layers]."""
        return self._needed(groups, cuts) & ~self.held

    def fetch(self, groups: Groups, cuts: tuple[int, ...]) -> Fetch:
        """The state that the stages of a plan without islands take.

        A node fetches every layer from all its holders at once, from each as much as its link carries. Everything that a node
        sends, or receives, shares its line. A layer that no reachable node holds comes from the checkpoint, which costs nothing
        here.
        """
        return self._fetch([_Wanted(self.lacking(groups, cuts), self.held, self._layer_bytes)])

    def fetch_layout(self, layout: Plan) -> Fetch:
        """The state that this layout takes. An island that goes on gets its state from its own nodes. A new island begins with
        the state that all islands share, from any node. With rounds, idle nodes copy that state while the others train, and
        nobody waits for them. All wait for the moments of new islands."""
        numbers = {name: number for number, name in enumerate(self.problem.cluster.ids)}
        shared = np.diff(self.problem.parameters_before) * self.problem.workload.bytes_shared_per_parameter_byte
        wanted = []
        for island in layout.islands:
            mine = self.island == island.stages[0].island
            goes_on = bool(mine.any())
            held = self.held & mine[:, None] if goes_on else self.held
            groups = tuple(tuple(numbers[name] for name in stage.replicas) for stage in island.stages)
            lacks = self._needed(groups, (0, *(stage.layers[1] for stage in island.stages))) & ~held
            if self.with_moments and not goes_on:
                wanted.append(_Wanted(lacks.copy(), held, self._layer_bytes - shared))
            if self.with_rounds and not goes_on:
                lacks[self.island < 0] = False
            wanted.append(_Wanted(lacks, held, self._layer_bytes if goes_on else shared))
        return self._fetch(wanted)

    def _needed(self, groups: Groups, cuts: tuple[int, ...]) -> NDArray[np.bool_]:
        needed = np.zeros_like(self.held)
        for stage, group in enumerate(groups):
            needed[list(group), cuts[stage] : cuts[stage + 1]] = True
        return needed

    def _fetch(self, wanted: Sequence[_Wanted]) -> Fetch:
        problem = self.problem
        bandwidth, flow = problem.bandwidth, np.zeros_like(problem.bandwidth)
        for lacks, held, layer_bytes in wanted:
            together = held.T @ bandwidth
            size = lacks.T * layer_bytes[:, None]
            flow += bandwidth * (held @ np.divide(size, together, out=np.zeros_like(together), where=together > 0))
        nodes = sum(int(lacks.any(axis=1).sum()) for lacks, _, _ in wanted)
        total = sum(float((lacks @ layer_bytes).sum()) for lacks, _, layer_bytes in wanted)
        busy = flow > 0
        if not busy.any():
            return Fetch(nodes, total, 0.0)
        links = problem.latency[busy] + flow[busy] / bandwidth[busy]
        with np.errstate(invalid="ignore", divide="ignore"):
            up, down = problem.cluster.on_lines(flow)
            lines = np.concatenate([up / problem.up, down / problem.down])
        return Fetch(nodes, total, max(float(links.max()), float(np.nanmax(lines))))

    def fetching(self, plan: Plan, weight: float, room: Room | None = None, freeing: float = 0.0) -> Fetching:
        """The state that ``plan`` has where, with ``weight``, ``room`` and ``freeing``."""
        problem = self.problem
        across = self.held.T @ problem.cluster.crossing(problem.bandwidth)
        share = np.divide(problem.down, across, out=np.ones_like(across), where=across > 0)
        whole = self.held.T @ problem.bandwidth
        together = whole * np.minimum(1.0, share)
        from_elsewhere = np.divide(across, whole, out=np.ones_like(across), where=whole > 0)
        lacking = ~self.held.T & (together > 0)
        receive = np.divide(self._layer_bytes[:, None], together, out=np.zeros_like(together), where=lacking)
        holding_lines, first = np.unique(problem.line, return_index=True)
        sources = (self.held.T @ (problem.line[:, None] == holding_lines) > 0) @ problem.up[first]
        send = np.divide(self._layer_bytes, sources, out=np.zeros_like(sources), where=sources > 0)
        places = [plan.stage_of(name) for name in problem.cluster.ids]
        return Fetching(
            receive_before=np.ascontiguousarray(np.cumsum(np.vstack([np.zeros(len(places)), receive]), axis=0).T),
            send_before=np.concatenate([[0.0], np.cumsum(send)]),
            place=np.array([-1 if stage is None else stage for stage in places], dtype=np.int64),
            cuts=np.array([0, *(stage.layers[1] for stage in plan.stages)], dtype=np.int64),
            crossing=np.ascontiguousarray(from_elsewhere[[stage.layers[0] for stage in plan.stages]].T),
            weight=weight,
            room=room or empty_room(len(places), self.held.shape[1]),
            freeing=freeing,
        )

    @property
    def _layer_bytes(self) -> Floats:
        problem = self.problem
        return problem.workload.moved(np.diff(problem.parameters_before), np.diff(problem.orthogonal_before))
