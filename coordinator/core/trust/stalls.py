"""Of a step that came to a standstill: who had what it needed, and did not deliver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.chains import chains
from dtfm.scheduler.model.plan import Plan


def stalled(plan: Plan, progress: Mapping[str, wire.Progress]) -> frozenset[str]:
    """The nodes of ``plan`` at which most micro-batches stand, by what each says it has of the step (by node). Empty: all are
    done, and it is the reduction that stands.

    A micro-batch stands at the last node that has its input, and at the neighbour that says it has not got it from there: one of
    the two is wrong. Few are at other places, as nodes have only so many in flight.
    """
    has = {node: (set(p.activations), set(p.gradients), set(p.finished)) for node, p in progress.items()}
    nothing: tuple[set[int], set[int], set[int]] = (set(), set(), set())
    at: Counter[str] = Counter()
    for number, chain in enumerate(chains(plan)):
        at.update(_stands_at(number, chain, [has.get(node, nothing) for node in chain]))
    most = max(at.values(), default=0)
    return frozenset(node for node, count in at.items() if count == most)


def _stands_at(number: int, chain: tuple[str, ...], has: list[tuple[set[int], set[int], set[int]]]) -> Collection[str]:
    """``has``: by place in the chain, the micro-batches whose activation has come, whose gradient has, and that are done."""
    last = len(chain) - 1
    done = [place for place in range(len(chain)) if number in has[place][2]]
    back = [place for place in range(len(chain)) if number in has[place][1]]
    there = [place for place in range(len(chain)) if number in has[place][0]]
    if done and done[0] == 0:
        return ()
    if done or back:  # it is on its way back, as far as ``place``
        place = min(back + done)
        return {chain[place], chain[place - 1]} if place in done else {chain[place]}
    if there and there[-1] == last:
        return {chain[last]}
    place = max(there, default=0)
    return {chain[place], chain[min(place + 1, last)]}
