"""What one replica group, all of whose members are known, can complete within a given time.

The argument is that of capacity.py, but every link is known: each pair of members exchanges shards, and each member sends
activations to nodes outside the group only. A group is a set of nodes, as the bits of an integer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtfm.scheduler.bound.capacity import Kinds
from dtfm.scheduler.model.compiled import compiled
from dtfm.scheduler.model.problem import Floats, Problem, Records
from dtfm.scheduler.model.tables import Tables

MEMBER = np.dtype(
    [
        ("node", np.int64),
        ("own", np.float64),  # seconds per byte of a shard to send its own shards and, later, sums
        ("up", np.float64),  # seconds per byte of a shard that its connection sends shards and sums
        ("down", np.float64),  # and receives them
        (
            "outside",
            np.float64,
        ),  # bytes of activations per second, both ways, over its links to nodes outside the group
        ("able", np.float64),  # the most micro-batches that it can complete
    ]
)
KIND = np.dtype(
    [(name, np.float64) for name in ("work", "parameters", "state", "kept", "entering", "leaving")]
    + [("first", np.bool_), ("last", np.bool_)]
)


class Setting(NamedTuple):
    """What does not depend on the group: bytes of activations that a node sends and receives per second at best, float64
    [nodes]; kinds of stages, KIND [kinds]; and the seconds that a step may take."""

    sent: Floats
    received: Floats
    kind: Records
    seconds: float


def setting(problem: Problem, kinds: Kinds, seconds: float) -> Setting:
    ratio = np.where(np.eye(len(problem.flops), dtype=bool), np.inf, problem.ratio)
    records = np.zeros(len(kinds.work), KIND)
    for name in ("work", "parameters", "kept", "entering", "leaving", "first", "last"):
        records[name] = getattr(kinds, name)
    records["state"] = kinds.parameters * problem.workload.least_device_bytes_per_parameter_byte
    return Setting(problem.up / ratio.min(axis=1), problem.down / ratio.min(axis=0), records, seconds)


@compiled
def slower(t: Tables, a: int, b: int) -> float:
    """Seconds per byte of the slower direction of a link; infinite where one does not exist."""
    return max(t.link[a, b].slowness, t.link[b, a].slowness)  # type: ignore[no-any-return]


@compiled
def gather(t: Tables, group: int, members: Records) -> tuple[int, float]:
    """Fills in all about the members except ``able``.

    Returns their number, and the seconds per byte of a shard for which the sums of all keep the slowest link or connection busy;
    infinite where members lack a link.
    """
    count, slowest = 0, 0.0
    for a in range(len(t.link)):
        if not (group >> a) & 1:
            continue
        member = members[count]
        count += 1
        out, sent, received, outside = 0.0, 0.0, 0.0, 0.0
        for b in range(len(t.link)):
            if a == b:
                continue
            link = slower(t, a, b)
            if (group >> b) & 1:
                out, slowest = max(out, t.link[a, b].slowness), max(slowest, link)
                sent += t.link[a, b].ratio
                received += t.link[b, a].ratio
            else:
                outside += 1.0 / link
        sent, received = sent * t.node[a].per_up, received * t.node[a].per_down
        slowest = max(slowest, sent, received)
        member.node, member.own, member.outside = a, 2 * max(out, sent), outside
        member.up, member.down = 2 * sent, 2 * received
    return count, slowest


@compiled
def complete(t: Tables, s: Setting, members: Records, count: int, slowest: float, number: int) -> float:
    """Fills in what each member can complete of a stage of this kind, and returns the sum; -1 when the sums of gradients alone
    take too long. Only the first ``count`` members count."""
    kind, seconds, total = s.kind[number], s.seconds, 0.0
    shard = kind.parameters / count
    tail = shard * slowest if count > 1 else 0.0
    if not tail <= seconds:
        return -1.0
    both = kind.entering + kind.leaving
    for member in members[:count]:
        pace = max(kind.work / t.node[member.node].flops, 1e-300)
        if count == 1:
            begun, most = seconds, seconds / (3 * pace)
        else:
            begun = seconds - max(tail, shard * member.own)  # the last backward pass, at the latest
            most = (begun / pace + 2) / 3
        if both > 0:
            sent, received = s.sent[member.node], s.received[member.node]
            most = min(most, max(min(begun, seconds - shard * member.down), 0.0) * received / both)
            most = min(most, max(seconds - shard * member.up, 0.0) * sent / both)
            most = min(most, seconds * member.outside / both)
            if kind.leaving > 0:
                most = min(most, begun * min(sent, member.outside) / kind.leaving)
        # A member that cannot compute anything may still take part in the reduction.
        member.able = whole(most, float(t.micro_batches)) if begun >= 0 else 0.0
        total += member.able
    return total


@compiled
def whole(number: float, most: float) -> float:
    """The largest whole number that is not above, rounding errors aside; at most ``most`` and at least 0."""
    return max(float(np.floor(min(number, most) * (1 + 1e-9) + 1e-9)), 0.0)
