"""The simulation in plain Python, with an object for everything: the yardstick of the compiled one (cost/simulate.py)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dtfm.scheduler.cost.in_flight import depths
from dtfm.scheduler.cost.reduction import EXACT_GROUP
from dtfm.scheduler.model.problem import Draft, Ints, Problem
from tests.scheduler.plans import chains_of
from tests.scheduler.yardstick_keeping import chosen, slowest_update


@dataclass(slots=True)
class _Device:
    """A node's remaining work and its progress."""

    stage: int
    forward_seconds: float
    limit: int
    left: int
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    held: int = 0
    busy: bool = False


@dataclass(slots=True)
class _Link:
    slowness: float
    latency: float
    taken_until: float = 0.0


class _Network:
    """The arrival times of messages; remembers until when each queue is busy."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        with np.errstate(divide="ignore"):
            self._up = [*(1.0 / problem.up).tolist(), *(1 / line.up for line in problem.cluster.lines)]
            self._down = [*(1.0 / problem.down).tolist(), *(1 / line.down for line in problem.cluster.lines)]
        nodes = len(self._up)
        self.sent, self.received = [0.0] * nodes, [0.0] * nodes
        self.sent_all, self.received_all = [0.0] * nodes, [0.0] * nodes
        self._links: dict[tuple[int, int], _Link] = {}

    def send(self, now: float, a: int, b: int, size: float, shard: bool = False) -> float:
        """The arrival time of ``size`` bytes of a tensor that are sent at ``now``. On lines a shard comes after all bytes that
        are there. Activations and gradients come only after each other."""
        link = self._links.get((a, b))
        if link is None:
            matrices = self._problem.slowness, self._problem.latency
            link = self._links[a, b] = _Link(*(float(matrix[a, b]) for matrix in matrices))
        if link.slowness == float("inf"):
            return float("inf")
        done = link.taken_until = max(now, link.taken_until) + size * link.slowness
        relay, from_line, to_line = (int(each) for each in (self._problem.via[a, b], *self._problem.line[[a, b]]))
        passed = [(from_line, to_line), (relay, relay)] if relay >= 0 else [(from_line, to_line)]
        for s, r in passed if from_line != to_line else []:
            sent = self.sent_all[s] = max(now, self.sent_all[s]) + size * self._up[s]
            received = self.received_all[r] = max(now, self.received_all[r]) + size * self._down[r]
            if not shard:
                sent = self.sent[s] = max(now, self.sent[s]) + size * self._up[s]
                received = self.received[r] = max(now, self.received[r]) + size * self._down[r]
            done = max(done, sent, received)
        return done + link.latency


def simulated_in_python(problem: Problem, draft: Draft) -> float:
    """Seconds from the first forward pass to the last sum of gradients, plus the slowest update of state in a host's memory.

    Infinite when a link is missing that the draft needs.
    """
    stages = len(draft.groups)
    work = np.diff(problem.flops_before[list(draft.cuts)])
    outputs = problem.activation[np.array(draft.cuts[1:]) - 1].tolist()
    chain_of = chains_of(draft).tolist()
    limits = depths(problem, draft)
    devices = {
        node: _Device(stage, float(work[stage] / problem.flops[node]), limit, 0)
        for stage, group in enumerate(draft.groups)
        for node, limit in zip(group, limits[stage], strict=True)
    }
    backward_passes = {node: chosen(problem, draft, device.stage, node).passes - 1 for node, device in devices.items()}
    for number, chain in enumerate(chain_of):
        heapq.heappush(devices[chain[0]].forward, number)
        for node in chain:
            devices[node].left += 1
    network = _Network(problem)
    queue: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
    made = 0
    for group in draft.groups:
        if np.isinf(problem.slowness[np.ix_(group, group)]).any():
            return float("inf")
    small = [group for group in draft.groups if 1 < len(group) <= EXACT_GROUP]
    reductions = {
        node: reduction for group in small for reduction in [_Reduction(problem, group, network)] for node in group
    }
    large: dict[tuple[int, ...], int] = {}
    summed_until = 0.0

    def at(time: float, action: Callable[..., None], *arguments: int) -> None:
        nonlocal made
        made += 1
        heapq.heappush(queue, (time, made, action, arguments))

    def start(now: float, node: int) -> None:
        device = devices[node]
        if device.busy:
            return
        if device.backward:
            device.busy = True
            device.left -= 1
            seconds = backward_passes[node] * device.forward_seconds
            if device.left == 0:
                finish_gradients(now, node)
            at(now + seconds, backward_done, node, heapq.heappop(device.backward))
        elif device.forward and device.held < device.limit:
            device.busy = True
            device.held += 1
            at(now + device.forward_seconds, forward_done, node, heapq.heappop(device.forward))

    def forward_done(now: float, node: int, number: int) -> None:
        device = devices[node]
        device.busy = False
        if device.stage == stages - 1:
            heapq.heappush(device.backward, number)
        else:
            after = chain_of[number][device.stage + 1]
            at(network.send(now, node, after, outputs[device.stage]), forward_arrived, after, number)
        start(now, node)

    def forward_arrived(now: float, node: int, number: int) -> None:
        heapq.heappush(devices[node].forward, number)
        start(now, node)

    def backward_done(now: float, node: int, number: int) -> None:
        device = devices[node]
        device.busy = False
        device.held -= 1
        if device.stage:
            before = chain_of[number][device.stage - 1]
            at(network.send(now, node, before, outputs[device.stage - 1]), backward_arrived, before, number)
        start(now, node)

    def backward_arrived(now: float, node: int, number: int) -> None:
        heapq.heappush(devices[node].backward, number)
        start(now, node)

    def finish_gradients(now: float, node: int) -> None:
        """Called when the node's last backward pass begins: its layers' gradients become final one after another."""
        first, past_last = draft.cuts[devices[node].stage : devices[node].stage + 2]
        for layer in reversed(range(first, past_last)):
            done = problem.flops_before[past_last] - problem.flops_before[layer]
            at(now + backward_passes[node] * float(done / problem.flops[node]), final, node, layer)

    def final(now: float, node: int, layer: int) -> None:
        group = draft.groups[devices[node].stage]
        if node in reductions:
            for owner, time in reductions[node].scatter(now, node, layer):
                at(time, summed, owner, layer)
        elif len(group) > EXACT_GROUP and layer == draft.cuts[devices[node].stage]:
            large[group] = large.get(group, 0) + 1
            if large[group] == len(group):
                layers = draft.cuts[devices[node].stage : devices[node].stage + 2]
                size = float(np.diff(problem.parameters_before[list(layers)])[0])
                at(now + reduction_by_formula(problem, np.array(group), size), done)

    def summed(now: float, node: int, layer: int) -> None:
        nonlocal summed_until
        summed_until = max(summed_until, reductions[node].gather(now, node, layer))

    def done(now: float) -> None:
        """Marks the end of a reduction by formula: the last event ends the step."""

    for group in draft.groups:
        for node in group:
            if devices[node].left == 0:
                finish_gradients(0.0, node)
    for node in draft.groups[0]:
        start(0.0, node)
    now = 0.0
    while queue:
        now, _, action, arguments = heapq.heappop(queue)
        if now == float("inf"):
            return now
        action(now, *arguments)
    return max(now, summed_until, *network.sent_all, *network.received_all) + slowest_update(problem, draft)


class _Reduction:
    """Reduce-scatter, then all-gather, of one group, layer by layer."""

    def __init__(self, problem: Problem, group: tuple[int, ...], network: _Network) -> None:
        self._group = group
        self._bytes = (np.diff(problem.parameters_before) / len(group)).tolist()
        self._network = network
        self._senders: dict[int, int] = {}
        self._complete: dict[int, dict[int, float]] = {}

    def scatter(self, now: float, node: int, layer: int) -> list[tuple[int, float]]:
        """Sends the shards of a node's final gradients of a layer to their owners.

        Returns nothing until the last node of the group has sent. Then returns all owners, each with the time when its shard is
        complete.
        """
        complete = self._complete.setdefault(layer, dict.fromkeys(self._group, 0.0))
        for owner, time in self._send(now, node, self._bytes[layer]):
            complete[owner] = max(complete[owner], time)
        self._senders[layer] = self._senders.get(layer, 0) + 1
        return list(complete.items()) if self._senders[layer] == len(self._group) else []

    def gather(self, now: float, node: int, layer: int) -> float:
        """Sends an owner's sum to all others. Returns the time when the last of them has it."""
        return max(time for _, time in self._send(now, node, self._bytes[layer]))

    def _send(self, now: float, me: int, size: float) -> list[tuple[int, float]]:
        """Sends ``size`` bytes to each other replica. Returns all replicas with the times when they have it."""
        return [
            (node, now if node == me else self._network.send(now, me, node, size, shard=True)) for node in self._group
        ]


def reduction_by_formula(problem: Problem, group: Ints, gradient_bytes: float) -> float:
    """The same as reduction_seconds."""
    if len(group) == 1:
        return 0.0
    index = np.ix_(group, group)
    if min(problem.up[group].min(), problem.down[group].min()) == 0:
        return float("inf")
    lines = problem.cluster.lines
    capacity = np.minimum([*problem.up, *(each.up for each in lines)], [*problem.down, *(each.down for each in lines)])
    line, relays = problem.line[group], problem.via[index]
    passed = [np.sum((line[:, None] == row) & (line != row)) + np.sum(relays == row) for row in range(len(capacity))]
    slownesses = problem.slowness[index].max(), max(np.array(passed) / capacity)
    return float(2 * gradient_bytes / len(group) * max(slownesses) + 2 * problem.latency[index].max())
