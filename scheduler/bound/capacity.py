"""How many micro-batches each node can complete within a given time, for every kind of stage and of replica group.

Suppose a plan ends within T seconds. A stage of it has layers [a, b), n replicas, and r stages from itself to the last. Of
each replica i that computes c micro-batches we know, whatever the rest of the plan:

- Memory. It keeps the state of its layers and the activations of at least memory.in_flight micro-batches, which grow with r: in
  the way that needs the least of each, and as if a micro-batch cost 3 forward passes even so.
- Gradients. No sum is sent before every replica has begun its last backward pass, because that pass changes every gradient.
  From then on each replica sends a shard, 1/n of the gradients, to each of the others and receives as much from each, over
  links and connections. A group takes as long for this as the slowest of its members: the tail. So all replicas have begun
  their last backward pass a tail before T. A replica's own gradients, too, leave only after its own last pass begins: another
  shard over each of its links before the sums. Among n - 1 others there is a link that is no better than the replica's
  (n - 1)-th best one.
- Work. Before its last backward pass begins, it has computed c forward and c - 1 backward passes.
- Connection. It receives c inputs from the stage before and c gradients of outputs from the stage behind; it sends as many
  outputs and gradients of inputs. A connection carries these and the shards one after the other. What it receives, and its
  outputs, must have arrived before its last backward pass begins.
- Links. All this goes over its links to nodes outside its group, both ways.

Each row of a table is a kind of stage (stages that cost the same are one kind), a range of n, a range of tails and a range of
r; for what varies within a range the most favourable value counts. So the numbers are never below what the node could do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dtfm.scheduler.cost.reduction import EXACT_GROUP
from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Floats, Ints, Problem

Bools = NDArray[np.bool_]

SIZES = (1, 2, 3, 4, 5, 6, 8, 11, 15, 21, 30, EXACT_GROUP + 1)
"""The least group size of each range."""
SIZES_APART = 16
"""Up to this number of nodes, each group size is a range of its own."""
TAILS = np.array([0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0])
"""Limits of the ranges of tails, as fractions of T."""
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48)
"""The least number of stages from this one to the last of each range."""
DIGITS = (9, 2, 1, 0)
"""Decimals to which costs agree that count as equal; the first for which there are few enough kinds."""
LEAST_PACE = 1e-290
"""Seconds of a forward pass of a layer that costs nothing."""
MOST_KINDS = 120_000
"""Largest product of the number of kinds and the number of nodes."""


def least_first(matrix: Floats) -> Floats:
    """Per node, the entries toward all others, sorted."""
    others = ~np.eye(len(matrix), dtype=bool)
    return np.sort(matrix[others].reshape(len(matrix), -1), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """What stages cost. Stages [a, b) with equal costs are one kind, number[a, b]; -1 where b <= a.

    Where these are too many, similar stages are one kind too, with the least of each of their costs.

    ``entering`` and ``leaving`` are the bytes of a micro-batch's activations at both ends: 0 before the first layer and
    after the last.
    """

    number: Ints
    work: Floats
    parameters: Floats
    kept: Floats
    entering: Floats
    leaving: Floats
    last: Bools

    @classmethod
    def of(cls, problem: Problem) -> Kinds:
        layers = len(problem.activation)
        first, past_last = np.triu_indices(layers + 1, k=1)
        between = np.concatenate([[0.0], problem.activation[:-1], [0.0]])
        befores = problem.flops_before, problem.parameters_before, problem.least_kept_before
        costs = np.column_stack(
            [*(before[past_last] - before[first] for before in befores), between[first], between[past_last]]
        )
        magnitude = 10.0 ** np.floor(np.log10(np.maximum(costs, 1e-300)))
        for digits in DIGITS:
            key = np.column_stack([np.round(costs / magnitude, digits) * magnitude, past_last == layers])
            made, kind = np.unique(key, axis=0, return_inverse=True)
            if len(made) * len(problem.flops) <= MOST_KINDS:
                break
        number = np.full((layers + 1, layers + 1), -1)
        number[first, past_last] = kind.ravel()
        least = np.full((len(made), costs.shape[1]), np.inf)
        np.minimum.at(least, kind.ravel(), costs)
        work, parameters, kept, entering, leaving = least.T * (1 - 1e-12)
        return cls(number, work, parameters, kept, entering, leaving, made[:, -1] == 1)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The most micro-batches that nodes complete: float64 ``most`` [rows, nodes].

    Row j is for stages of ``kind[j]``, with ``depth[j]`` (an index into Capacities.depths) and at most ``replicas[j]``
    replicas. Kinds whose replicas need no more room at a depth than at the one before have no rows of their own there.
    """

    seconds: float
    kind: Ints
    depth: Ints
    replicas: Ints
    most: Floats


class Capacities:
    """The tables of a problem, one for each number of seconds."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kinds = kinds = Kinds.of(problem)
        count = len(problem.flops)
        least = [size for size in (range(1, count + 1) if count <= SIZES_APART else SIZES) if size <= count]
        self._sizes = list(zip(least, [*(size - 1 for size in least[1:]), count], strict=True))
        self.most_stages = min(count, len(problem.activation))
        self.depths = np.array([depth for depth in DEPTHS if depth <= self.most_stages])
        self.pace = kinds.work[:, None] / problem.flops
        self._room()
        if count > 1:
            self._connections()

    def _room(self) -> None:
        """``fits`` [depths, kinds, nodes]; ``same`` [depths, kinds]: as at the depth before."""
        problem, kinds = self.problem, self.kinds
        held = np.array([min(in_flight(0, int(depth)), problem.workload.micro_batches) for depth in self.depths])
        need = kinds.parameters * problem.workload.least_device_bytes_per_parameter_byte + held[:, None] * kinds.kept
        possible = kinds.last == (self.depths == 1)[:, None]
        self.fits = (need[:, :, None] <= problem.memory + 1.0) & possible[:, :, None]
        self.same = np.zeros(need.shape, dtype=bool)
        self.same[1:] = (self.fits[1:] == self.fits[:-1]).all(axis=2) & possible[1:]

    def _connections(self) -> None:
        problem, count = self.problem, len(self.problem.flops)
        others = ~np.eye(count, dtype=bool)
        size = np.arange(2, count + 1)
        with np.errstate(divide="ignore"):
            # Of groups of 2, 3, ... nodes: seconds per byte of gradients for sending, or receiving, all sums of a node; and
            # for what the worst link of a group with this node carries.
            pairs = least_first(np.maximum(problem.slowness, problem.slowness.T))
            self._out, self._worst = least_first(problem.slowness) / size, pairs / size
            self._up = np.cumsum(least_first(problem.ratio), axis=1) / size / problem.up[:, None]
            self._down = np.cumsum(least_first(problem.ratio.T), axis=1) / size / problem.down[:, None]
            # Bytes per second, both ways at the same time, over a node's best 1, 2, ... links.
            self._rate = np.cumsum(1.0 / pairs, axis=1)
            # Bytes of activations per second over a node's connection.
            self._sent = problem.up / np.where(others, problem.ratio, np.inf).min(axis=1)
            self._received = problem.down / np.where(others, problem.ratio, np.inf).min(axis=0)

    def table(self, seconds: float) -> Table | None:
        """The table for steps of ``seconds``, without the rows of groups that cannot complete all micro-batches; None when
        nothing is left."""
        total = self.problem.workload.micro_batches
        parts = []
        for least, largest in self._sizes:
            for most in self._of_groups(seconds, least, largest):
                if largest == 1:
                    most = np.where(most >= total, most, 0.0)
                live = np.flatnonzero(most.sum(axis=1) >= total)
                for depth in range(len(self.depths)):
                    rows = live[~self.same[depth, live]]
                    here = np.where(self.fits[depth, rows], most[rows], 0.0)
                    ranked = (
                        here if largest >= here.shape[1] else -np.partition(-here, largest - 1, axis=1)[:, :largest]
                    )
                    enough = ranked.sum(axis=1) >= total
                    rows = rows[enough]
                    parts.append((rows, np.full(len(rows), depth), np.full(len(rows), largest), here[enough]))
        kind, at, replicas, table = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return Table(seconds, kind, at, replicas, table) if len(kind) else None

    def _of_groups(self, seconds: float, least: int, largest: int) -> Iterator[Floats]:
        """For groups of ``least`` to ``largest`` nodes and each range of tails: the most micro-batches [kinds, nodes]."""
        kinds = self.kinds
        pace = np.maximum(self.pace, LEAST_PACE)
        if least == 1:
            yield self._whole(seconds / (3 * pace), self._crossing(seconds, seconds, 0.0, 0.0, 1))
            return
        of_size = slice(least - 2, largest - 1)
        worst, out, up, down = (
            matrix[:, of_size].min(axis=1) for matrix in (self._worst, self._out, self._up, self._down)
        )
        reachable = np.isfinite(worst)
        reduced = kinds.parameters[:, None] * self.problem.workload.sent_per_reduced_byte
        worst, out, up, down = (np.where(reachable, way, 0.0) * reduced for way in (worst, out, up, down))
        tail = np.maximum(worst, np.maximum(up, down))
        own = 2 * np.maximum(out, up)
        # Larger groups reduce by formula, at the same time as other messages.
        shards_up, shards_down = (2 * way if largest <= EXACT_GROUP else 0.0 * way for way in (up, down))
        for shortest, longest in itertools.pairwise(TAILS * seconds):
            begun = seconds - np.maximum(np.maximum(own, tail), shortest)  # the last backward pass, at the latest
            possible = reachable & (tail <= longest) & (begun >= 0)
            begun = np.where(possible, begun, 0.0)
            passes = (begun / pace + 2) / 3
            crossing = self._crossing(seconds, begun, shards_up, shards_down, least)
            yield np.where(possible, self._whole(passes, crossing), 0.0)

    def _crossing(
        self, seconds: float, begun: Floats | float, up: Floats | float, down: Floats | float, size: int
    ) -> Floats:
        """The most micro-batches whose activations and gradients pass a node's connection and links."""
        if len(self.problem.flops) == 1:
            return np.where(self.kinds.entering + self.kinds.leaving > 0, 0.0, np.inf)[:, None]
        leaving = self.kinds.leaving[:, None]
        both = self.kinds.entering[:, None] + leaving
        outside = len(self.problem.flops) - size
        links = self._rate[:, outside - 1] if outside else np.zeros(len(self.problem.flops))
        limits = (
            (both, np.maximum(np.minimum(begun, seconds - down), 0.0) * self._received),
            (both, np.maximum(seconds - up, 0.0) * self._sent),
            (leaving, begun * np.minimum(self._sent, links)),
            (both, seconds * links),
        )
        result = np.full((len(both), len(self.problem.flops)), np.inf)
        for size_of, carried in limits:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                result = np.minimum(result, np.where(size_of > 0, carried / size_of, np.inf))
        return result

    def _whole(self, passes: Floats, crossing: Floats) -> Floats:
        most = np.minimum(np.minimum(passes, crossing), self.problem.workload.micro_batches)
        return np.asarray(np.floor(np.maximum(most, 0.0) * (1 + 1e-9) + 1e-9))
