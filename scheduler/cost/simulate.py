"""Simulates one step event by event, as the nodes run it: exact where the estimate is fast.

A device computes one micro-batch at a time, backward before forward and lower numbers first. It holds at most in_flight.depths
in flight. The last stage starts each backward pass right after its forward pass.

During a node's last backward pass its layers' gradients become final from the last layer to the first. Each is reduced
immediately, in parallel with other work: shards go to their owners, sums to all.

A message passes three queues at the same time: its link, the sender's line with all that it sends, and the receiver's line with
all that it receives. A relayed message also passes both queues of the relay's line. Within a machine a message passes the link
alone. It arrives one latency after the slowest of these queues is done. On lines, shards give way to activations and their
gradients, as nodes send them.

Of events at the same time, the one that was made first comes first.

Groups of more than EXACT_GROUP replicas reduce by formula, all layers at the end, because their messages grow with the square
of their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dtfm.scheduler.cost.beginning import LINK, connect, empty_queues, idle_devices, most_events, shard_bytes
from dtfm.scheduler.cost.in_flight import needs_of_seats
from dtfm.scheduler.cost.places import seats_passed
from dtfm.scheduler.cost.queues import EVENT, drop_first_event, put_event, put_number, take_number
from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Draft, Floats, Ints, Problem, Records
from dtfm.scheduler.model.tables import Tables, tables

# These are np.int64, because Numba would compile a function once more for each plain int that is an argument.
_KINDS: Any = np.arange(7)
_FORWARD_ARRIVED, _BACKWARD_ARRIVED, _FORWARD_DONE, _BACKWARD_DONE, _GRADIENTS_FINAL, _SHARD_SUMMED, _REDUCED = _KINDS
_FORWARD, _BACKWARD = _KINDS[:2]


def simulate(problem: Problem, draft: Draft) -> float:
    """Seconds from the first forward pass to the last sum of gradients, plus the slowest update of state in a host's memory.

    Infinite when a link is missing that the draft needs."""
    return float(simulated(tables(problem), draft))


# The functions below take arrays one by one: Numba counts the references to each array of a tuple, which takes longer than the
# simulation itself. For n seats the arrays are:
#   events, made         the heap of events, and its counts: see put_event.
#   devices, links       records [n], then lines without a seat, and [n, n]. Only the links that the plan needs are set.
#   queues, waiting      by seat, the heaps of the micro-batches that wait for _FORWARD and _BACKWARD: records [n, 2], and int64.
#   passed               int64 [stages, micro-batches]: see seats_passed.
#   flops_before         float64 [layers + 1]: see Tables.
#   shards               float64 [layers]: the bytes of each owner's shard.
#   final                int64 [layers]: the nodes whose gradients of a layer are final.
#   complete             float64 [layers, n]: when a seat has got its shard of a layer from all.


@entry(makes_arrays=True)
def simulated(t: Tables, s: Draft) -> float:
    """The same as `simulate`."""
    count, layers = len(s.node), len(t.layer) - 1
    flops_before = np.empty(layers + 1)
    for layer in range(layers + 1):
        flops_before[layer] = t.layer[layer].flops_before
    links = np.empty((count, count), LINK)
    if not connect(t, s, links):
        return np.inf
    passes, possible, update = needs_of_seats(t, s)
    devices, queues, passed = idle_devices(t, s, passes, possible), empty_queues(s), seats_passed(s)
    waiting = np.empty(2 * passed.size, np.int64)
    for number in range(passed.shape[1]):
        _wait(queues, waiting, passed[0, number], _FORWARD, number)
    events, made = np.empty(most_events(s, passed.shape[1]), EVENT), np.zeros(2, np.int64)
    shards, final, complete = shard_bytes(t, s), np.zeros(layers, np.int64), np.zeros((layers, count))
    for seat in range(count):
        if s.load[seat] == 0:
            _finish_gradients(events, made, devices, flops_before, seat, 0.0)
    for seat in range(s.first[1]):
        _start(events, made, devices, queues, waiting, flops_before, seat, 0.0)
    now, summed_until = 0.0, 0.0
    while made[0]:
        event = events[0]
        now, kind, seat, number = event.time, event.kind, event.seat, event.number
        drop_first_event(events, made)
        if kind == _GRADIENTS_FINAL:
            _scatter(events, made, devices, links, shards, final, complete, seat, number, now)
        elif kind == _SHARD_SUMMED:
            summed_until = max(summed_until, _gather(devices, links, shards, seat, number, now))
        elif kind != _REDUCED:
            if kind in (_FORWARD_ARRIVED, _BACKWARD_ARRIVED):
                _wait(queues, waiting, seat, kind - _FORWARD_ARRIVED, number)
            else:
                _done(events, made, devices, links, queues, waiting, passed, seat, kind - _FORWARD_DONE, number, now)
            _start(events, made, devices, queues, waiting, flops_before, seat, now)
    for device in devices:
        # Shards that gave way after their time was reckoned: no line has carried more than it can.
        summed_until = max(summed_until, device.shards_sent_until, device.shards_received_until)
    return max(now, summed_until) + update


@compiled()
def _start(
    events: Records,
    made: Ints,
    devices: Records,
    queues: Records,
    waiting: Ints,
    flops_before: Floats,
    seat: int,
    now: float,
) -> None:
    """The device begins its next pass, if it is free and there is one."""
    device = devices[seat]
    if device.busy:
        return
    if queues[seat, _BACKWARD].count:
        device.busy = 1
        device.left -= 1
        if device.left == 0:
            _finish_gradients(events, made, devices, flops_before, seat, now)
        number = _next(queues, waiting, seat, _BACKWARD)
        put_event(events, made, now + device.backward_passes * device.forward_seconds, _BACKWARD_DONE, seat, number)
    elif queues[seat, _FORWARD].count and device.held < device.limit:
        device.busy = 1
        device.held += 1
        number = _next(queues, waiting, seat, _FORWARD)
        put_event(events, made, now + device.forward_seconds, _FORWARD_DONE, seat, number)


@compiled()
def _wait(queues: Records, waiting: Ints, seat: int, way: int, number: int) -> None:
    """The micro-batch waits for the device; ``way`` is _FORWARD or _BACKWARD."""
    queue = queues[seat, way]
    put_number(waiting, queue.begin, queue.count, number)
    queue.count += 1


@compiled()
def _next(queues: Records, waiting: Ints, seat: int, way: int) -> int:
    """Takes the lowest number that waits."""
    queue = queues[seat, way]
    number = take_number(waiting, queue.begin, queue.count)
    queue.count -= 1
    return number


@compiled()
def _done(
    events: Records,
    made: Ints,
    devices: Records,
    links: Records,
    queues: Records,
    waiting: Ints,
    passed: Ints,
    seat: int,
    way: int,
    number: int,
    now: float,
) -> None:
    """The device has computed the micro-batch and sends it on; the last stage turns around, and the first has nothing to send."""
    device = devices[seat]
    device.busy = 0
    if way == _BACKWARD:
        device.held -= 1
        if device.stage:
            to = passed[device.stage - 1, number]
            time = _send(devices, links, seat, to, device.input_bytes, now, False)
            put_event(events, made, time, _BACKWARD_ARRIVED, to, number)
    elif device.stage == len(passed) - 1:
        _wait(queues, waiting, seat, _BACKWARD, number)
    else:
        to = passed[device.stage + 1, number]
        time = _send(devices, links, seat, to, device.output_bytes, now, False)
        put_event(events, made, time, _FORWARD_ARRIVED, to, number)


@compiled()
def _send(devices: Records, links: Records, sender: int, receiver: int, size: float, now: float, shard: bool) -> float:
    """The arrival time of ``size`` bytes of a tensor that go from seat to seat at ``now``. A ``shard`` gives way to activations
    and their gradients."""
    link, a, b = links[sender, receiver], devices[sender].line, devices[receiver].line
    link.busy_until = max(now, link.busy_until) + size * link.slowness
    done = link.busy_until
    if a != b:
        done = max(done, _up(devices[a], size, now, shard), _down(devices[b], size, now, shard))
    if link.via >= 0:
        relay = devices[link.via]
        done = max(done, _up(relay, size, now, shard), _down(relay, size, now, shard))
    return float(done + link.latency)


@compiled()
def _up(device: Any, size: float, now: float, shard: bool) -> float:
    """When the device's line has sent as many bytes."""
    seconds = size * device.per_up
    device.shards_sent_until = max(now, device.shards_sent_until) + seconds
    if shard:
        return float(device.shards_sent_until)
    device.sent_until = max(now, device.sent_until) + seconds
    return float(device.sent_until)


@compiled()
def _down(device: Any, size: float, now: float, shard: bool) -> float:
    """When the device's line has received as many bytes."""
    seconds = size * device.per_down
    device.shards_received_until = max(now, device.shards_received_until) + seconds
    if shard:
        return float(device.shards_received_until)
    device.received_until = max(now, device.received_until) + seconds
    return float(device.received_until)


@compiled()
def _finish_gradients(
    events: Records, made: Ints, devices: Records, flops_before: Floats, seat: int, now: float
) -> None:
    """The node's last backward pass begins: its layers' gradients become final one after another. Where each is computed again,
    that is just before its gradients are."""
    device = devices[seat]
    for layer in range(device.past_last_layer - 1, device.first_layer - 1, -1):
        work = flops_before[device.past_last_layer] - flops_before[layer]
        seconds = device.backward_passes * (work / device.flops)
        put_event(events, made, now + seconds, _GRADIENTS_FINAL, seat, layer)


@compiled()
def _scatter(
    events: Records,
    made: Ints,
    devices: Records,
    links: Records,
    shards: Floats,
    final: Ints,
    complete: Floats,
    seat: int,
    layer: int,
    now: float,
) -> None:
    """The node sends the shards of a layer's gradients, which are final, to their owners. When the last node of a group has
    sent, each owner will sum what it got. A large group's last node with all gradients begins the reduction by formula."""
    device = devices[seat]
    first, past_last = device.first_seat, device.past_last_seat
    final[layer] += 1
    last = final[layer] == past_last - first
    if device.reduction_seconds >= 0:
        if last and layer == device.first_layer:
            put_event(events, made, now + device.reduction_seconds, _REDUCED, seat, layer)
        return
    if past_last - first == 1:
        return
    for owner in range(first, past_last):
        time = now if owner == seat else _send(devices, links, seat, owner, shards[layer], now, True)
        complete[layer, owner] = max(complete[layer, owner], time)
    if last:
        for owner in range(first, past_last):
            put_event(events, made, complete[layer, owner], _SHARD_SUMMED, owner, layer)


@compiled()
def _gather(devices: Records, links: Records, shards: Floats, owner: int, layer: int, now: float) -> float:
    """Sends the owner's sum to all others of its group. Returns the time when the last of them has it."""
    last = now
    for other in range(devices[owner].first_seat, devices[owner].past_last_seat):
        if other != owner:
            last = max(last, _send(devices, links, owner, other, shards[layer], now, True))
    return last
