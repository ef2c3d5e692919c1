"""The estimate once more, a formula at a time: slow, with dictionaries, and sharing no code with cost/estimate.py."""

from __future__ import annotations

import math
from collections.abc import Callable

from dtfm.scheduler.cost.in_flight import SLACK
from dtfm.scheduler.cost.pace import WAITING
from dtfm.scheduler.cost.reduction import EXACT_GROUP
from dtfm.scheduler.model.memory import in_flight
from dtfm.scheduler.model.problem import Draft, Floats, Problem
from tests.scheduler.yardstick_keeping import chosen, slowest_update


def estimated(problem: Problem, draft: Draft) -> float:
    """Seconds for one step: when the last node of the first stage ends, or the last reduction if that is later; then the slowest
    update of state in a host's memory."""
    plan = _Plan(problem, draft)
    end = _ends(plan, {node: _own_end(plan, node) for node in plan.stage})
    reduced = max(_reduced(plan, stage, end) for stage in range(plan.stages))
    return max(*(end[node] for node in draft.groups[0]), reduced) + slowest_update(problem, draft)


class _Plan:
    """Nodes' stages, loads and seconds of a forward pass, flows as (sender, receiver, micro-batches), and times on links."""

    def __init__(self, problem: Problem, draft: Draft) -> None:
        self.problem, self.draft, self.stages = problem, draft, len(draft.groups)
        self.stage = {node: stage for stage, group in enumerate(draft.groups) for node in group}
        self.load = {
            node: int(load)
            for group, loads in zip(draft.groups, draft.loads, strict=True)
            for node, load in zip(group, loads, strict=True)
        }
        self.forward = {
            node: float(self.sum_of(problem.flops_before, stage) / problem.flops[node])
            for node, stage in self.stage.items()
        }
        self.ways = {node: chosen(problem, draft, stage, node) for node, stage in self.stage.items()}
        self.passes = {node: way.passes for node, way in self.ways.items()}
        self.flows = [
            (a, b, int(flow[row, column]))
            for flow, senders, receivers in zip(draft.flows, draft.groups, draft.groups[1:], strict=False)
            for row, a in enumerate(senders)
            for column, b in enumerate(receivers)
            if flow[row, column]
        ]
        self.arrival = self._along(self._arrival)
        self.homeward = self._along(self._homeward)

    def sum_of(self, before: Floats, stage: int) -> float:
        return float(before[self.draft.cuts[stage + 1]] - before[self.draft.cuts[stage]])

    def size(self, boundary: int) -> float:
        """Bytes of a micro-batch's activation after the stage ``boundary``."""
        return float(self.problem.activation[self.draft.cuts[boundary + 1] - 1])

    def on_link(self, a: int, b: int) -> float:
        """Seconds that the link from a to b is busy with a micro-batch."""
        return float(self.size(min(self.stage[a], self.stage[b])) * self.problem.slowness[a, b])

    def carried(self, row: int) -> tuple[float, float]:
        """Bytes that a line sends and receives per step, including the bytes that it passes on for others."""
        sent = received = 0.0
        for c, d, n in self.flows:
            for a, b in ((c, d), (d, c)):
                size = n * self.size(self.stage[c])
                sender, receiver = self.problem.line[a], self.problem.line[b]
                passed = self.problem.via[a, b] == row
                sent += size if passed or sender == row != receiver else 0.0
                received += size if passed or receiver == row != sender else 0.0
        return sent, received

    def shards(self, row: int) -> float:
        """Bytes of gradients that pass a line each way when all replicas send each other their shards once."""
        problem, passed = self.problem, 0.0
        for stage, group in enumerate(self.draft.groups):
            shard = self.sum_of(problem.parameters_before, stage) / len(group)
            for a in group:
                for b in group:
                    passed += shard * (problem.line[a] == row != problem.line[b])
                    passed += shard * (len(group) <= EXACT_GROUP and problem.via[a, b] == row)
        return passed

    def connection(self, row: int) -> tuple[float, float]:
        """Bytes per second that a line sends and receives at most."""
        problem, nodes = self.problem, len(self.problem.flops)
        if row >= nodes:
            return problem.cluster.lines[row - nodes].up, problem.cluster.lines[row - nodes].down
        return float(problem.up[row]), float(problem.down[row])

    def on_relay(self, a: int, b: int) -> float:
        """Seconds of a step that the relay between a and b keeps its line busy."""
        if (relay := int(self.problem.via[a, b])) < 0:
            return 0.0
        return max(size / most for size, most in zip(self.carried(relay), self.connection(relay), strict=True))

    def way(self, a: int, b: int) -> float:
        return self.on_link(a, b) + float(self.problem.latency[a, b])

    def _along(self, of: Callable[[int, dict[int, float]], float]) -> dict[int, float]:
        """A value per node that follows from the values of the nodes of the stage before."""
        known: dict[int, float] = {}
        for group in self.draft.groups:
            for node in group:
                known[node] = of(node, known)
        return known

    def _arrival(self, node: int, known: dict[int, float]) -> float:
        """The first micro-batch's arrival: min over senders a of arrival[a] + forward[a] + way(a, node)."""
        before = [known[a] + self.forward[a] + self.way(a, node) for a, b, _ in self.flows if b == node]
        return min(before, default=0.0 if self.stage[node] == 0 else math.inf)

    def _homeward(self, node: int, known: dict[int, float]) -> float:
        """Mean over micro-batches of way(node, a) + backward[a] + homeward[a]; a is the node that sent it."""
        each = [
            (self.way(node, a) + (self.passes[a] - 1) * self.forward[a] + known[a]) * n
            for a, b, n in self.flows
            if b == node
        ]
        return sum(each) / max(self.load[node], 1)

    def trip(self, node: int) -> float:
        """Mean over micro-batches of both passes[node] + way(node, b) + way(b, node) + trip(b); b is the next node."""
        each = [n * (self.way(node, b) + self.way(b, node) + self.trip(b)) for a, b, n in self.flows if a == node]
        return self.passes[node] * self.forward[node] + sum(each) / max(self.load[node], 1)

    def longest_trip(self, node: int) -> float:
        """The same over the slowest links, with times on links multiplied by SLACK."""
        beyond = [
            SLACK * (self.way(node, b) + self.way(b, node)) + self.longest_trip(b)
            for a, b, _ in self.flows
            if a == node
        ]
        return self.passes[node] * self.forward[node] + max(beyond, default=0.0)

    def depth(self, node: int) -> float:
        """in_flight.depths: a round trip's worth at the pace of the busiest device, and one more per stage from here on; as much
        as the node has room for; at least memory.in_flight. The last stage turns around at once."""
        stage = self.stage[node]
        least = in_flight(stage, self.stages)
        if stage == self.stages - 1:
            return least
        busiest = max(max(self.passes[other] * self.forward[other] * self.load[other] for other in self.stage), 1e-12)
        wanted = math.ceil(self.longest_trip(node) * self.load[node] / busiest - 1e-6)
        way = self.ways[node]
        room = math.floor(way.room(self.problem, node) / max(way.each, 1.0))
        return float(max(least, min(wanted + self.stages - stage, room, self.problem.workload.micro_batches)))


def _own_end(plan: _Plan, node: int) -> float:
    """When a node, or its slowest link, would be done if nobody else were late. It is the node's arrival plus the longest of
    these:

    - computing: both passes * load.
    - the first trip, then all other backward passes and the forward passes that the depth did not allow before.
    - its line: bytes sent / up, bytes received / down.

    If micro-batches in flight are limited and the node is not in the last stage, this is mixed with the time of its round
    trips, trip * load / depth.

    For a link it is arrival + trip + the seconds for all further micro-batches, in its slower direction or over its relay.
    """
    load, depth = plan.load[node], plan.depth(node)
    if load == 0:
        return 0.0
    line = int(plan.problem.line[node])
    sent, received = plan.carried(line)
    busy = max(
        plan.passes[node] * plan.forward[node] * load,
        plan.trip(node) + plan.forward[node] * ((plan.passes[node] - 1) * (load - 1) + max(load - depth, 0)),
        sent / plan.connection(line)[0] if sent else 0.0,
        received / plan.connection(line)[1] if received else 0.0,
    )
    if depth < load and plan.stage[node] < plan.stages - 1:
        busy = (busy**4 + (WAITING * plan.trip(node) * load / depth) ** 4) ** 0.25
    links = [
        plan.trip(node)
        + max(
            max(plan.on_link(node, b), plan.on_link(b, node)) * (n - 1), plan.on_relay(node, b), plan.on_relay(b, node)
        )
        for a, b, n in plan.flows
        if a == node
    ]
    return plan.arrival[node] + max(busy, *links, 0.0)


def _ends(plan: _Plan, own: dict[int, float]) -> dict[int, float]:
    """When each node's last backward pass ends.

    A node's pass ends no earlier than the passes of the nodes that it feeds, plus a way and a backward pass. Their passes end
    no earlier than its own, less a way and a backward pass. A node's pass also ends no earlier than its last micro-batch. For
    this its micro-batches are spread evenly, from their first arrival to the latest time when they can still come home with the
    last.
    """
    end = dict(own)
    for a, b, _ in plan.flows:
        end[b] = max(end[b], end[a] - plan.way(b, a) - (plan.passes[a] - 1) * plan.forward[a])
    for stage in reversed(range(plan.stages - 1)):
        for a, b, _ in plan.flows:
            if plan.stage[a] == stage:
                end[a] = max(end[a], end[b] + plan.way(b, a) + (plan.passes[a] - 1) * plan.forward[a])
    finished = max(end[node] for node in plan.draft.groups[0])
    for node, load in plan.load.items():
        if load:
            span = finished - plan.homeward[node] - plan.arrival[node]
            end[node] = max(end[node], plan.arrival[node] + span * (1 - 1 / load))
    return end


def _reduced(plan: _Plan, stage: int, end: dict[int, float]) -> float:
    """When a stage's gradients are reduced.

    Every node sends each owner its shard, from ``begun`` on: all layers but one are final before the last backward pass ends.
    When the node with the latest end has begun, owners send sums. The last layer's gradients cannot hide: they go to the
    owners, and on.
    """
    problem, group = plan.problem, plan.draft.groups[stage]
    latest = max(group, key=lambda node: end[node])
    if len(group) == 1:
        return end[latest]
    layers = plan.draft.cuts[stage + 1] - plan.draft.cuts[stage]
    shard = plan.sum_of(problem.parameters_before, stage) / len(group)
    hidden = {node: (plan.passes[node] - 1) * plan.forward[node] * (1 - 1 / layers) for node in group}

    def per_byte(a: int, b: int) -> float:
        """The seconds per byte of the link, or of a line that it passes. The line serves the reductions of all stages at the
        same time; a large group counts only its own."""
        if problem.line[a] == problem.line[b]:
            return float(problem.slowness[a, b])

        def shards(row: int) -> float:
            if len(group) <= EXACT_GROUP:
                return plan.shards(row) / shard
            between = [(problem.line[c], problem.line[d], problem.via[c, d]) for c in group for d in group]
            return float(sum((sender == row != receiver) + (via == row) for sender, receiver, via in between))

        sender, receiver, relay = int(problem.line[a]), int(problem.line[b]), int(problem.via[a, b])
        passing = shards(relay) / min(plan.connection(relay)) if relay >= 0 else 0.0
        out, into = (shards(row) / plan.connection(row)[way] for way, row in enumerate((sender, receiver)))
        return float(max(problem.slowness[a, b], out, into, passing))

    if len(group) > EXACT_GROUP:
        transfer = 2 * shard * max(per_byte(a, b) for a in group for b in group)
        latency = 2 * max(problem.latency[a, b] for a in group for b in group)
        return float(end[latest] + max(transfer - min(hidden.values()), transfer / layers) + latency)
    begun = {node: end[node] - hidden[node] for node in group}
    on_link = {(a, b): 0.0 if a == b else shard * per_byte(a, b) for a in group for b in group}
    arrives = {(a, b): begun[a] + on_link[a, b] for a in group for b in group}
    summed = {
        b: max(max(arrives[a, b], end[a] + on_link[a, b] / layers) + problem.latency[a, b] for a in group)
        for b in group
    }
    early = {a: max(begun[latest], *(arrives[a, b] for b in group)) for a in group}
    return float(
        max(
            max(early[a] + on_link[a, b], summed[a] + on_link[a, b] / layers) + problem.latency[a, b]
            for a in group
            for b in group
        )
    )
