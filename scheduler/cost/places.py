"""Which micro-batch travels along which seats: the rule of model/chains.places, compiled."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Draft, Floats, Ints, Records

_LINK = np.dtype([("receiver", "i8"), ("flow", "i8"), ("left", "i8"), ("used", "f8")], align=True)
"""A link with micro-batches: how many in all, how many are yet to be sent, and the share that is sent, as the rule counts it."""

_ONE: int = np.int64(1)  # type: ignore[assignment]  # a plain 1 would compile _send once more


@entry(makes_arrays=True)
def seats_passed(s: Draft) -> Ints:
    """The seats that each micro-batch passes: int64 [stages, micro-batches]."""
    micro_batches = 0
    for seat in range(s.first[1]):
        micro_batches += s.load[seat]
    passed = np.zeros((len(s.cut) - 1, micro_batches), np.int64)
    _send(passed[0], _ONE, s.load, s.load, s.first[0], s.first[1], passed[0])  # all come from one place
    for stage in range(1, len(passed)):
        first = s.first[stage - 1]
        for number in range(micro_batches):
            passed[stage, number] = passed[stage - 1, number] - first
        flow = s.flow[s.flow_at[stage - 1] : s.flow_at[stage]]
        _send(passed[stage], s.first[stage] - first, flow, s.load, s.first[stage], s.first[stage + 1], passed[stage])
    return passed


@compiled(makes_arrays=True)
def _send(at: Ints, senders: int, flow: Ints, load: Ints, first: int, past_last: int, to: Ints) -> None:
    """Sets ``to``, the seats in [first, past_last), of micro-batches that are ``at`` these places of senders.

    ``flow`` has a row of receivers for each sender. Only its links that carry something are looked at.
    """
    links = np.empty(len(flow), _LINK)
    begin, received, filled = np.zeros(senders + 1, np.int64), np.zeros(len(load), np.int64), np.empty(len(load))
    count = 0
    for sender in range(senders):
        for receiver in range(first, past_last):
            carried = flow[sender * (past_last - first) + receiver - first]
            if carried:
                link = links[count]
                link.receiver, link.flow, link.left, link.used = receiver, carried, carried, 0.5 / carried
                count += 1
        begin[sender + 1] = count
    for receiver in range(first, past_last):
        filled[receiver] = 0.5 / load[receiver]
    for number in range(len(at)):
        link = links[_first_choice(links, filled, begin[at[number]], begin[at[number] + 1])]
        receiver = to[number] = link.receiver
        link.left -= 1
        received[receiver] += 1
        link.used = (link.flow - link.left + 0.5) / link.flow
        filled[receiver] = (received[receiver] + 0.5) / load[receiver]


@compiled()
def _first_choice(links: Records, filled: Floats, begin: int, end: int) -> int:
    """The link among [begin, end) with room whose two shares add up to the least; the first of equals."""
    best, least = begin, np.inf
    for index in range(begin, end):
        link = links[index]
        share = link.used + filled[link.receiver]
        if link.left and share < least:
            best, least = index, share
    return best
