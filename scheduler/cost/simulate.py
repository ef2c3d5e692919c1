"""One step, simulated event by event as the nodes run it: exact where the estimate is fast.

A device computes one micro-batch at a time, backward before forward and lower numbers first, and holds at most
in_flight.depths in flight; the last stage turns around at once. During a node's last backward pass its layers' gradients
become final from the last layer to the first, and each is reduced at once, in parallel with everything else: shards
go to their owners, sums to all. A message passes three queues at the same time: its link, everything that the sender
sends, and everything that the receiver receives. It arrives one latency after the slowest of them is done.

Groups of more than EXACT_GROUP replicas reduce by formula, all layers at the end, because their messages grow with
the square of their number.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dtfm.scheduler.cost.estimate import EXACT_GROUP, reduction
from dtfm.scheduler.cost.in_flight import depths
from dtfm.scheduler.model.problem import Draft, Problem


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
    ratio: float
    latency: float
    taken_until: float = 0.0


class _Network:
    """The arrival times of messages; remembers until when each queue is busy."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        with np.errstate(divide="ignore"):
            self._up: list[float] = (1.0 / problem.up).tolist()
            self._down: list[float] = (1.0 / problem.down).tolist()
        nodes = len(self._up)
        self.sent, self.received = [0.0] * nodes, [0.0] * nodes
        self._links: dict[tuple[int, int], _Link] = {}

    def send(self, now: float, a: int, b: int, size: float) -> float:
        """The arrival time of ``size`` bytes of a tensor that are sent at ``now``."""
        link = self._links.get((a, b))
        if link is None:
            matrices = self._problem.slowness, self._problem.ratio, self._problem.latency
            link = self._links[a, b] = _Link(*(float(matrix[a, b]) for matrix in matrices))
        if link.slowness == float("inf"):
            return float("inf")
        encoded = size * link.ratio
        link.taken_until = max(now, link.taken_until) + size * link.slowness
        sent = self.sent[a] = max(now, self.sent[a]) + encoded * self._up[a]
        received = self.received[b] = max(now, self.received[b]) + encoded * self._down[b]
        return max(link.taken_until, sent, received) + link.latency


def simulate(problem: Problem, draft: Draft) -> float:
    """Seconds from the first forward pass to the last sum of gradients; infinite when a link that is needed does not exist."""
    stages = len(draft.groups)
    work = np.diff(problem.flops_before[list(draft.cuts)])
    outputs = problem.activation[np.array(draft.cuts[1:]) - 1].tolist()
    chain_of = draft.chains.tolist()
    limits = depths(problem, draft).tolist()
    devices = {
        node: _Device(stage, float(work[stage] / problem.flops[node]), limits[stage], 0)
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
    for group in draft.groups:
        if np.isinf(problem.slowness[np.ix_(group, group)]).any():
            return float("inf")
    small = [group for group in draft.groups if len(group) > 1 and len(group) * problem.cluster.copies <= EXACT_GROUP]
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
        """Called when the node's last backward pass begins: its layers' gradients become final one after another."""
        first, past_last = draft.cuts[devices[node].stage : devices[node].stage + 2]
        for layer in reversed(range(first, past_last)):
            done = problem.flops_before[past_last] - problem.flops_before[layer]
            at(now + 2 * float(done / problem.flops[node]), final, node, layer)

    def final(now: float, node: int, layer: int) -> None:
        group = draft.groups[devices[node].stage]
        if node in reductions:
            for owner, time in reductions[node].scatter(now, node, layer):
                at(time, summed, owner, layer)
        elif len(group) * problem.cluster.copies > EXACT_GROUP and layer == draft.cuts[devices[node].stage]:
            large[group] = large.get(group, 0) + 1
            if large[group] == len(group):
                layers = draft.cuts[devices[node].stage : devices[node].stage + 2]
                size = float(np.diff(problem.parameters_before[list(layers)])[0])
                at(now + sum(reduction(problem, np.array(group), size)), done)

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
    return max(now, summed_until)


class _Reduction:
    """Reduce-scatter, then all-gather, of one group, layer by layer.

    No other traffic uses the links inside a group, so only its nodes' connections are shared with the pipeline.
    """

    def __init__(self, problem: Problem, group: tuple[int, ...], network: _Network) -> None:
        index = np.ix_(group, group)
        ratio = problem.ratio[index]
        self._group = group
        self._place = {node: place for place, node in enumerate(group)}
        self._bytes = (np.diff(problem.parameters_before) / len(group)).tolist()
        self._network = network
        self._latency: list[list[float]] = problem.latency[index].tolist()
        self._on_link: list[list[float]] = problem.slowness[index].tolist()
        self._on_up: list[list[float]] = (ratio / problem.up[list(group), None]).tolist()
        self._on_down: list[list[float]] = (ratio / problem.down[list(group)]).tolist()
        self._taken = [[0.0] * len(group) for _ in group]
        self._senders: dict[int, int] = {}
        self._complete: dict[int, list[float]] = {}

    def scatter(self, now: float, node: int, layer: int) -> list[tuple[int, float]]:
        """Sends the shards of a node's final gradients of a layer to their owners.

        Returns nothing until the last node of the group has sent; then all owners, each with the time at which its
        shard is complete.
        """
        complete = self._complete.setdefault(layer, [0.0] * len(self._group))
        for place, time in enumerate(self._send(now, self._place[node], self._bytes[layer])):
            if time > complete[place]:
                complete[place] = time
        self._senders[layer] = self._senders.get(layer, 0) + 1
        return list(zip(self._group, complete, strict=True)) if self._senders[layer] == len(self._group) else []

    def gather(self, now: float, node: int, layer: int) -> float:
        """Sends an owner's sum to all others; returns the time at which the last of them has it."""
        return max(self._send(now, self._place[node], self._bytes[layer]))

    def _send(self, now: float, me: int, size: float) -> list[float]:
        """Sends ``size`` bytes to each other replica and returns the arrival times: _Network.send for all at once."""
        network, taken = self._network, self._taken[me]
        sent = max(now, network.sent[self._group[me]])
        arrivals = []
        rows = zip(self._group, self._latency[me], self._on_link[me], self._on_up[me], self._on_down[me], strict=True)
        for place, (other, latency, on_link, on_up, on_down) in enumerate(rows):
            if place == me:
                arrivals.append(now)
                continue
            link = taken[place]
            taken[place] = link = (link if link > now else now) + size * on_link
            sent += size * on_up
            received = network.received[other]
            network.received[other] = received = (received if received > now else now) + size * on_down
            arrivals.append(max(link, sent, received) + latency)
        network.sent[self._group[me]] = sent
        return arrivals
