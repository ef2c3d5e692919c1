"""The state that is transferred when one plan follows another, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Floats, Groups, Ints, Problem
from dtfm.scheduler.model.sketch import Position


class Fetching(NamedTuple):
    """What the transfer of state costs, roughly and quickly, for compiled functions.

    ``receive_before[i, k]`` is the seconds in which node i could receive what it lacks of layers [0, k) if nobody else wanted
    anything: float64 [nodes, layers + 1]. ``send_before[k]`` is the seconds in which those who hold them could send layers
    [0, k) once: float64 [layers + 1]. ``place[i]`` is the stage that node i holds, -1 for none, and stage s holds the layers
    [cuts[s], cuts[s + 1]). ``crossing[i, s]`` is the share of what node i fetches of stage s that comes from other machines:
    float64 [nodes, stages]. ``weight`` is the seconds per step that a second of fetching costs until the next change of plan.
    """

    receive_before: Floats
    send_before: Floats
    place: Ints
    cuts: Ints
    crossing: Floats
    weight: float


@compiled
def fetching_seconds(fetching: Fetching, position: Position) -> float:
    """Seconds until all have fetched what they lack: the slowest receiver, or the holders of the stage that is wanted most."""
    longest = 0.0
    sending = np.zeros(len(fetching.cuts))
    for node in range(len(position.place)):
        stage = position.place[node]
        if stage < 0:
            continue
        first, past_last = position.cuts[stage], position.cuts[stage + 1]
        receive = fetching.receive_before[node]
        longest = max(longest, receive[past_last] - receive[first])
        for held in range(len(fetching.cuts) - 1):
            low, high = max(first, fetching.cuts[held]), min(past_last, fetching.cuts[held + 1])
            if low < high and fetching.place[node] != held:
                sending[held] += fetching.crossing[node, held] * (
                    fetching.send_before[high] - fetching.send_before[low]
                )
    return float(max(longest, sending.max()))


def nothing_to_fetch(nodes: int, layers: int) -> Fetching:
    """Without an incumbent: no state has to move."""
    return Fetching(
        np.zeros((nodes, layers + 1)),
        np.zeros(layers + 1),
        np.full(nodes, -1),
        np.array([0, layers]),
        np.ones((nodes, 1)),
        0.0,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Which node holds the state of which layer: bool [nodes, layers]."""

    problem: Problem
    held: NDArray[np.bool_]

    @classmethod
    def of(cls, problem: Problem, plan: Plan) -> Holdings:
        """The state that nodes hold under ``plan``: none when the plan is for a model with another number of layers."""
        held = np.zeros((len(problem.flops), len(problem.activation)), dtype=bool)
        for index, name in enumerate(problem.cluster.ids):
            stage = plan.stage_of(name)
            if stage is not None and plan.stages[-1].layers[1] == held.shape[1]:
                held[index, slice(*plan.stages[stage].layers)] = True
        return cls(problem, held)

    def lacking(self, groups: Groups, cuts: tuple[int, ...]) -> NDArray[np.bool_]:
        """The layers that each node must fetch for these stages: bool [nodes, layers]."""
        needed = np.zeros_like(self.held)
        for stage, group in enumerate(groups):
            needed[list(group), cuts[stage] : cuts[stage + 1]] = True
        return needed & ~self.held

    def seconds(self, groups: Groups, cuts: tuple[int, ...]) -> float:
        """Seconds until the last node has its state.

        A node fetches every layer from all its holders at once, from each as much as its link carries. Everything
        that a node sends, or receives, shares its line. A layer that no reachable node holds comes from the
        checkpoint, which costs nothing here.
        """
        problem = self.problem
        bandwidth = problem.bandwidth
        together = self.held.T @ bandwidth
        wanted = self.lacking(groups, cuts).T * self._layer_bytes[:, None]
        flow = bandwidth * (self.held @ np.divide(wanted, together, out=np.zeros_like(together), where=together > 0))
        busy = flow > 0
        if not busy.any():
            return 0.0
        links = problem.latency[busy] + flow[busy] / bandwidth[busy]
        with np.errstate(invalid="ignore", divide="ignore"):
            up, down = problem.cluster.on_lines(flow)
            lines = np.concatenate([up / problem.up, down / problem.down])
        return max(float(links.max()), float(np.nanmax(lines)))

    def fetching(self, plan: Plan, weight: float) -> Fetching:
        """The state that ``plan`` has where, with ``weight``."""
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
        )

    def fetched(self, groups: Groups, cuts: tuple[int, ...]) -> tuple[int, float]:
        """How many nodes fetch state for these stages, and how many bytes."""
        lacking = self.lacking(groups, cuts)
        return int(lacking.any(axis=1).sum()), float((lacking @ self._layer_bytes).sum())

    @property
    def _layer_bytes(self) -> Floats:
        return np.diff(self.problem.parameters_before) * self.problem.workload.bytes_moved_per_parameter_byte
