"""The state that is transferred when one plan follows another, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dtfm.scheduler.model.decision import StateTransfer, Why
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.problem import Floats, Groups, Problem


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
        that a node sends, or receives, shares its connection. A layer that no reachable node holds comes from the
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
            connections = np.concatenate([flow.sum(axis=1) / problem.up, flow.sum(axis=0) / problem.down])
        return max(float(links.max()), float(np.nanmax(connections)))

    def transfers(self, groups: Groups, cuts: tuple[int, ...]) -> tuple[StateTransfer, ...]:
        """The transfers that these stages need, in pipeline order."""
        lacking = self.lacking(groups, cuts)
        result = []
        for stage, group in enumerate(groups):
            for node in group:
                layers = np.flatnonzero(lacking[node])
                if len(layers):
                    keeps = self.held[node, cuts[stage] : cuts[stage + 1]].any()
                    why = Why.WIDENS if keeps else Why.MOVES if self.held[node].any() else Why.JOINS
                    size = float(self._layer_bytes[layers].sum())
                    result.append(StateTransfer(self.problem.cluster.ids[node], tuple(layers.tolist()), size, why))
        return tuple(result)

    @property
    def _layer_bytes(self) -> Floats:
        return np.diff(self.problem.parameters_before) * self.problem.workload.bytes_moved_per_parameter_byte
