"""A lower bound on the seconds per step of any plan, from the way of micro-batches through all stages.

Suppose a plan ends within T seconds. Then every stage [a, b) has nodes that together compute all
micro-batches, and the number that a node can compute is limited. Its first micro-batch has passed all layers before
a, at best on the fastest device, and crossed at least one link. Each micro-batch takes the time of three forward
passes. After the last one, either its gradient goes all the way back, or, when other nodes hold the stage too, the
node exchanges gradients: with n - 1 others, at best over its n - 1 fastest links, and at best hidden behind its last
backward pass. A node that holds a stage alone computes all micro-batches, but exchanges no gradients.
So each stage needs at least the FLOP/s of those nodes that compute most micro-batches per FLOP/s. Dynamic programming
finds the least sum over all cuts; when it exceeds the FLOP/s of the cluster, no plan takes T seconds. Bisection finds
the least T that is not ruled out. This says most with few micro-batches.
"""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.problem import Floats, Problem
from dtfm.scheduler.model.workload import Workload

MOST_NODES = 256
"""Largest number of nodes for which more than `work_bound` is computed."""


def work_bound(workload: Workload, flops: Floats) -> float:
    """Certified lower bound from the devices alone.

    All devices share all work without a pause, and one micro-batch passes through the fastest device.
    """
    work = 3.0 * float(np.sum([layer.forward_flops for layer in workload.layers]))
    bound = max(work * workload.micro_batches / float(flops.sum()), work / float(flops.max()))
    return bound * (1.0 - 1e-12)  # margin for rounding: others add up the same terms in another order


def way_bound(problem: Problem) -> float:
    """The least seconds per step that the conditions do not rule out."""
    least = work_bound(problem.workload, problem.flops)
    if len(problem.flops) > MOST_NODES:
        return least
    conditions = _Conditions(problem)
    low, high = least, 2 * least
    while not conditions.met(high):
        low, high = high, 2 * high
        if high > 1e12 * least:
            return least  # no plan exists
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if conditions.met(middle) else (middle, high)
    return max(least, low * (1.0 - 1e-9))


class _Conditions:
    """The conditions, with all stages [a, b), a < b, as rows and nodes as columns."""

    def __init__(self, problem: Problem) -> None:
        layers, count = len(problem.activation), len(problem.flops)
        self.layers, self.micro_batches, self.flops = layers, problem.workload.micro_batches, problem.flops
        self.first, self.past_last = np.triu_indices(layers + 1, k=1)
        fastest = float(problem.flops.max())
        work = problem.flops_before[self.past_last] - problem.flops_before[self.first]
        parameters = problem.parameters_before[self.past_last] - problem.parameters_before[self.first]
        self.pace = np.maximum(work[:, None], 1e-300) / problem.flops  # seconds per forward pass
        self.fits = parameters[:, None] * problem.workload.least_device_bytes_per_parameter_byte <= problem.memory + 1.0
        one_way, exchange = _shortest(problem)
        before = problem.flops_before[self.first] / fastest
        self.arrival = (before + one_way[self.first])[:, None]
        self.way = (3 * before + 2 * one_way[self.first])[:, None]  # a lower bound, not the way of any one micro-batch
        after = 3 * (problem.flops_before[-1] - problem.flops_before[self.past_last]) / fastest
        self.beyond = (after + np.append(exchange, 0.0)[self.past_last])[:, None]
        if count > 1:
            rate, tail = _reducible(problem), _tail(problem)
            with np.errstate(divide="ignore"):
                reduced = problem.reduced_before[self.past_last] - problem.reduced_before[self.first]
                self.reduced = np.maximum(tail, reduced[:, None] / rate - 2 * self.pace)
        else:
            self.reduced = np.full_like(self.pace, np.inf)

    def met(self, seconds: float) -> bool:
        """Whether the cluster's FLOP/s could suffice for a step of ``seconds``."""
        homeward = seconds - self.way
        taken = self.fits & (homeward >= 3 * self.pace + self.beyond)
        alone = taken & (_passes(homeward, self.pace) >= self.micro_batches)
        together = _passes(np.minimum(homeward, seconds - self.arrival - self.reduced), self.pace)
        together = np.minimum(np.where(taken, together, 0.0), self.micro_batches)
        with np.errstate(divide="ignore"):
            price = np.where(together >= 1, self.micro_batches * self.flops / together, np.inf)
        need = np.minimum(np.where(alone, self.flops, np.inf), price).min(axis=1)
        # A stage is possible only if its candidates together can compute all micro-batches.
        need = np.where(alone.any(axis=1) | (together.sum(axis=1) >= self.micro_batches), need, np.inf)
        least = np.full(self.layers + 1, np.inf)
        least[0] = 0.0
        for past_last in range(1, self.layers + 1):
            stages = self.past_last == past_last
            least[past_last] = (least[self.first[stages]] + need[stages]).min()
        return bool(least[-1] <= float(self.flops.sum()) * (1 + 1e-9))


def _passes(window: Floats, pace: Floats) -> Floats:
    """The number of whole micro-batches, forward and backward, within ``window`` seconds; infinite where one costs
    almost nothing."""
    with np.errstate(over="ignore"):
        return np.asarray(np.floor(np.maximum(window, 0.0) / (3 * pace) * (1 + 1e-9) + 1e-9))


def _shortest(problem: Problem) -> tuple[Floats, Floats]:
    """Seconds to send a stage's input over the best link, and forward and back over the best pair of links.

    Both are float64 [layers], indexed by the stage's first layer; 0 for the first stage.
    """
    apart = ~np.eye(len(problem.flops), dtype=bool)
    one_way, exchange = np.zeros(len(problem.activation)), np.zeros(len(problem.activation))
    for layer in range(1, len(problem.activation)):
        size = float(problem.activation[layer - 1])
        with np.errstate(invalid="ignore"):
            single = problem.latency + np.where(np.isinf(problem.slowness), np.inf, size * problem.slowness)
        one_way[layer] = single[apart].min(initial=np.inf)
        exchange[layer] = problem.exchange(size)[apart].min(initial=np.inf)
    return one_way, exchange


def _reducible(problem: Problem) -> Floats:
    """The most bytes of a stage's gradients per second that a group with this node reduces: float64 [nodes].

    Each of n replicas sends a shard, 1/n of all gradients, to every other replica, and later the sum of its own
    shard. The other replicas' shards may arrive before a node's last backward pass, their sums cannot.
    """
    count = len(problem.flops)
    link = np.maximum(_least_first(problem.slowness), _least_first(problem.slowness.T) / 2)
    with np.errstate(divide="ignore"):
        sent = np.cumsum(_least_first(problem.ratio), axis=1) / problem.up[:, None]
        received = np.cumsum(_least_first(problem.ratio.T), axis=1) / problem.down[:, None] / 2
    size = np.arange(2, count + 1)
    return np.asarray((size / (2.0 * np.maximum(link, np.maximum(sent, received)))).max(axis=1))


def _tail(problem: Problem) -> Floats:
    """Seconds from a replica's last backward pass until its last gradients reach an owner and their sum reaches
    another replica."""
    apart = np.where(np.eye(len(problem.flops), dtype=bool), np.inf, problem.latency)
    return np.asarray(apart.min(axis=1) + apart.min())


def _least_first(matrix: Floats) -> Floats:
    """Per node, the entries toward all others, sorted."""
    others = ~np.eye(len(matrix), dtype=bool)
    return np.sort(matrix[others].reshape(len(matrix), -1), axis=1)
