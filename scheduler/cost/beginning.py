"""The simulation at the beginning of a step: devices, links and queues."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.cost.in_flight import depths_of_seats
from dtfm.scheduler.cost.reduction import EXACT_GROUP, reduction_seconds
from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Draft, Floats, Records
from dtfm.scheduler.model.tables import Tables

DEVICE = np.dtype(
    [
        ("stage", "i8"),
        ("first_layer", "i8"),
        ("past_last_layer", "i8"),
        ("first_seat", "i8"),  # of its group
        ("past_last_seat", "i8"),
        ("flops", "f8"),
        ("forward_seconds", "f8"),
        ("backward_passes", "f8"),  # what a backward pass costs, in forward passes
        ("input_bytes", "f8"),
        ("output_bytes", "f8"),
        ("reduction_seconds", "f8"),  # of a large group, by formula; -1 for others
        ("limit", "i8"),  # of micro-batches in flight
        ("held", "i8"),
        ("left", "i8"),  # backward passes that have not begun
        ("busy", "i8"),
        ("line", "i8"),  # the device whose line it is on: itself, or one behind the seats
        ("per_up", "f8"),
        ("per_down", "f8"),
        ("sent_until", "f8"),  # what it sends keeps its connection busy until then
        ("received_until", "f8"),
        ("shards_sent_until", "f8"),  # the same with shards, which give way to the others
        ("shards_received_until", "f8"),
    ],
    align=True,
)
LINK = np.dtype(
    [
        ("slowness", "f8"),
        ("latency", "f8"),
        ("busy_until", "f8"),
        ("via", "i8"),  # the device that relays it, or -1
    ],
    align=True,
)
QUEUE = np.dtype([("begin", "i8"), ("count", "i8")], align=True)


@compiled()
def connect(t: Tables, s: Draft, links: Records) -> bool:
    """Sets the links that the plan needs, within stages, and those with flows and back; False if one does not exist.

    ``links`` is LINK [seats, seats].
    """
    stages = len(s.cut) - 1
    for stage in range(stages):
        begin, end = s.first[stage], s.first[stage + 1]
        for a in range(begin, end):
            for b in range(begin, end):
                if not _set_link(t, s, links, a, b):
                    return False
        if stage == stages - 1:
            return True
        flow = s.flow_at[stage]
        for a in range(begin, end):
            for b in range(end, s.first[stage + 2]):
                if s.flow[flow] and not (_set_link(t, s, links, a, b) and _set_link(t, s, links, b, a)):
                    return False
                flow += 1
    return True


@compiled()
def _set_link(t: Tables, s: Draft, links: Records, sender: int, receiver: int) -> bool:
    a, b, link = s.node[sender], s.node[receiver], links[sender, receiver]
    link.via = -1
    if t.relayed > 0 and t.link[a, b].via >= 0:
        link.via = _device_of(s, t.link[a, b].via)
    link.slowness, link.latency, link.busy_until = t.link[a, b].slowness, t.link[a, b].latency, 0.0
    return not np.isinf(link.slowness)


@compiled()
def _device_of(s: Draft, row: int) -> int:
    """The number of the device with the line in this row of Tables.node: its seat, or one behind all seats."""
    for seat in range(len(s.node)):
        if s.node[seat] == row:
            return seat
    return int(len(s.node) + row)


@compiled(makes_arrays=True)
def idle_devices(t: Tables, s: Draft, passes: Floats, possible: Floats) -> Records:
    """All devices, idle: DEVICE [seats]. Where lines are shared, one more for each row of Tables.node: lines without a seat.
    ``passes`` and ``possible`` come from in_flight.needs_of_seats."""
    count = len(s.node)
    devices = np.zeros(count + (len(t.node) if t.relayed > 0 or len(t.node) > len(t.link) else 0), DEVICE)
    limits = depths_of_seats(t, s, passes, possible)
    for row in range(len(devices) - count):
        line = devices[count + row]
        line.per_up, line.per_down = t.node[row].per_up, t.node[row].per_down
    for stage in range(len(s.cut) - 1):
        first, past_last, begin, end = s.cut[stage], s.cut[stage + 1], s.first[stage], s.first[stage + 1]
        work = t.layer[past_last].flops_before - t.layer[first].flops_before
        formula = -1.0
        if end - begin > EXACT_GROUP:
            size = t.layer[past_last].gradients_before - t.layer[first].gradients_before
            formula = reduction_seconds(t, s.node[begin:end], size)
        for seat in range(begin, end):
            device, node = devices[seat], s.node[seat]
            device.stage, device.limit, device.left = stage, limits[seat], s.load[seat]
            device.first_layer, device.past_last_layer = first, past_last
            device.first_seat, device.past_last_seat = begin, end
            device.flops, device.forward_seconds = t.node[node].flops, work / t.node[node].flops
            device.backward_passes = passes[seat] - 1
            device.input_bytes, device.output_bytes = t.layer[first - 1].activation, t.layer[past_last - 1].activation
            device.reduction_seconds = formula
            device.line = seat if t.node[node].line == node else count + t.node[node].line
            device.per_up, device.per_down = t.node[node].per_up, t.node[node].per_down
    return devices


@compiled(makes_arrays=True)
def empty_queues(s: Draft) -> Records:
    """Empty queues, each with room for the node's load: QUEUE [seats, 2]."""
    queues = np.zeros((len(s.node), 2), QUEUE)
    begin = 0
    for seat in range(len(s.node)):
        for way in range(2):
            queues[seat, way].begin = begin
            begin += s.load[seat]
    return queues


@compiled(makes_arrays=True)
def shard_bytes(t: Tables, s: Draft) -> Floats:
    """[layers]: the bytes of a layer's gradients, divided by the nodes that hold it."""
    shards = np.empty(len(t.layer) - 1)
    for stage in range(len(s.cut) - 1):
        for layer in range(s.cut[stage], s.cut[stage + 1]):
            size = t.layer[layer + 1].gradients_before - t.layer[layer].gradients_before
            shards[layer] = size / (s.first[stage + 1] - s.first[stage])
    return shards


@compiled()
def most_events(s: Draft, micro_batches: int) -> int:
    """The most events that wait at a time: one for each device, micro-batch on its way, and layer of a node, and one per
    stage."""
    most = len(s.node) + micro_batches
    for stage in range(len(s.cut) - 1):
        most += (s.cut[stage + 1] - s.cut[stage]) * (s.first[stage + 1] - s.first[stage]) + 1
    return most
