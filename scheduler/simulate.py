"""One step as the nodes really do it, event by event: the exact tier behind the estimate.

What is simulated is ``node``: a device computes one micro-batch at a time, backward before forward and lower numbers first,
and holds no more in flight than memory.in_flight says; the last stage turns round at once. During a node's last backward its
layers' gradients become final from the last layer to the first, and each is reduced at once, beside the rest: shards to
their owners, sums back to all. Messages pass three queues at the same time: their link, all that the sender sends, all
that the receiver receives; they are there when the slowest is done, and the latency has passed. Groups of more than EXACT_GROUP
replicas reduce by formula, all layers at the end: their messages go with the square of their number.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dtfm.scheduler.estimate import reduction
from dtfm.scheduler.memory import in_flight
from dtfm.scheduler.problem import Draft, Problem

EXACT_GROUP = 48


@dataclass(slots=True)
class _Device:
    """What one node has to do, and how far it is."""

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
    ratio: float
    latency: float
    taken_until: float = 0.0


class _Network:
    """When messages arrive; remembers how long each queue is taken."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        with np.errstate(divide="ignore"):
            self._up: list[float] = (1.0 / problem.up).tolist()
            self._down: list[float] = (1.0 / problem.down).tolist()
        nodes = len(self._up)
        self._sent, self._received = [0.0] * nodes, [0.0] * nodes
        self._links: dict[tuple[int, int], _Link] = {}

    def send(self, now: float, a: int, b: int, size: float) -> float:
        """The time at which ``size`` bytes of a tensor, sent now, arrive."""
        link = self._links.get((a, b))
        if link is None:
            matrices = self._problem.slowness, self._problem.ratio, self._problem.latency
            link = self._links[a, b] = _Link(*(float(matrix[a, b]) for matrix in matrices))
        if link.slowness == float("inf"):
            return float("inf")
        encoded = size * link.ratio
        link.taken_until = max(now, link.taken_until) + size * link.slowness
        sent = self._sent[a] = max(now, self._sent[a]) + encoded * self._up[a]
        received = self._received[b] = max(now, self._received[b]) + encoded * self._down[b]
        return max(link.taken_until, sent, received) + link.latency


def simulate(problem: Problem, draft: Draft) -> float:
    """Seconds from the first forward to the last sum of gradients; infinite when a link that is needed does not exist."""
    stages = len(draft.groups)
    work = np.diff(problem.flops_before[list(draft.cuts)])
    outputs = problem.activation[np.array(draft.cuts[1:]) - 1].tolist()
    chain_of = np.repeat(draft.chains, draft.shares, axis=0).tolist()
    devices = {
        node: _Device(stage, float(work[stage] / problem.flops[node]), in_flight(stage, stages), 0)
        for stage, group in enumerate(draft.groups)
        for node in group
    }
    for number, chain in enumerate(chain_of):
        heapq.heappush(devices[chain[0]].forward, number)
        for node in chain:
            devices[node].left += 1
    network = _Network(problem)
    queue: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
    made = 0
    messages = _Reduction(problem, draft, network)
    large: dict[tuple[int, ...], int] = {}

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
            seconds = 2 * device.forward_seconds
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
        """The node's last backward begins: its layers' gradients become final one after the other."""
        first, past_last = draft.cuts[devices[node].stage : devices[node].stage + 2]
        for layer in reversed(range(first, past_last)):
            done = problem.flops_before[past_last] - problem.flops_before[layer]
            at(now + 2 * float(done / problem.flops[node]), final, node, layer)

    def final(now: float, node: int, layer: int) -> None:
        group = draft.groups[devices[node].stage]
        if len(group) * problem.cluster.copies <= EXACT_GROUP:
            for time, owner in messages.final(now, node, layer):
                at(time, shard_arrived, owner, layer)
        elif layer == draft.cuts[devices[node].stage]:
            large[group] = large.get(group, 0) + 1
            if large[group] == len(group):
                layers = draft.cuts[devices[node].stage : devices[node].stage + 2]
                size = float(np.diff(problem.parameters_before[list(layers)])[0])
                at(now + sum(reduction(problem, np.array(group), size)), sum_arrived)

    def shard_arrived(now: float, node: int, layer: int) -> None:
        for time in messages.shard_arrived(now, node, layer):
            at(time, sum_arrived)

    def sum_arrived(now: float) -> None:
        """The last of these is the end."""

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
    return now


class _Reduction:
    """Reduce-scatter, then all-gather, of every layer on its own."""

    def __init__(self, problem: Problem, draft: Draft, network: _Network) -> None:
        self._network = network
        self._group = {node: group for group in draft.groups for node in group}
        self._bytes = np.diff(problem.parameters_before).tolist()
        self._waiting: dict[tuple[int, int], int] = {}

    def final(self, now: float, node: int, layer: int) -> list[tuple[float, int]]:
        """Sends a layer's shards to their owners; arrivals (time, owner)."""
        group = self._group[node]
        if len(group) == 1:
            return []
        shard = self._bytes[layer] / len(group)
        sent = [(self._network.send(now, node, owner, shard), owner) for owner in group if owner != node]
        return [*sent, (now, node)]

    def shard_arrived(self, now: float, node: int, layer: int) -> list[float]:
        """A shard that the node owns is here, or its own is final; once all are, their sum goes to everyone: arrivals."""
        group = self._group[node]
        here = self._waiting[node, layer] = self._waiting.get((node, layer), 0) + 1
        if here != len(group):
            return []
        shard = self._bytes[layer] / len(group)
        return [self._network.send(now, node, other, shard) for other in group if other != node]
