"""The paper's cost model (arXiv 2206.01288, sections 3.2 and 3.3): equal groups, and the links alone.

In a group, each member exchanges a shard of the gradients with all others, one after another: the slowest member decides. At a
boundary, the groups are matched so that the slowest pair is as fast as possible: this pair decides. A step takes the seconds of
the slowest group, plus the sum over all boundaries.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dtfm.scheduler.model.compiled import entry
from dtfm.scheduler.model.decision import PaperSeconds
from dtfm.scheduler.model.problem import Floats, Groups, Ints


def paper_seconds(exchanges: Floats, groups: Groups) -> PaperSeconds:
    """The cost of equal groups in this order. ``exchanges``: Tables.paper, or Problem.paper_exchanges."""
    gradients, activations = exchanges
    members = [np.array(group, dtype=np.int64) for group in groups]
    return PaperSeconds(
        data_parallel=max(slowest_member(gradients, group)[1] for group in members),
        pipeline=sum(slowest_pair(activations, one, other)[2] for one, other in pairwise(members)),
    )


@entry()
def slowest_member(gradients: Floats, members: Ints) -> tuple[int, float]:
    """The member of a group whose exchanges with all others take longest, and their seconds.

    ``gradients`` is float64 [nodes, nodes], zero on the diagonal.
    """
    slowest, longest = -1, -1.0
    for one in members:
        seconds = 0.0
        for other in members:
            seconds += gradients[one, other]
        if seconds > longest:
            slowest, longest = int(one), seconds
    return slowest, longest


@entry(makes_arrays=True)
def slowest_pair(activations: Floats, before: Ints, after: Ints) -> tuple[int, int, float]:
    """The slowest pair in the matching of two groups of one size whose slowest pair is fastest, and its seconds.

    ``activations`` is float64 [nodes, nodes]. Senders are matched one after another, each by the augmenting path whose slowest
    pair is fastest. So after each sender, the matching is the best one of all senders so far.
    """
    size = len(before)
    sender_of, receiver_of = np.full(size, -1), np.full(size, -1)
    reach, via = (
        np.empty(size),
        np.empty(size, np.int64),
    )  # by receiver: the slowest pair on the way there, and who sends last
    done = np.empty(size, np.bool_)
    one, other, longest = -1, -1, -1.0
    for sender in range(size):
        reach[:] = np.inf
        done[:] = False
        row, so_far = sender, 0.0
        while True:
            nearest, least = -1, np.inf
            for column in range(size):
                if done[column]:
                    continue
                seconds = max(so_far, activations[before[row], after[column]])
                if seconds < reach[column]:
                    reach[column], via[column] = seconds, row
                if nearest < 0 or reach[column] < least:
                    nearest, least = column, reach[column]
            done[nearest] = True
            so_far = least
            if sender_of[nearest] < 0:
                break
            row = sender_of[nearest]
        column = nearest
        while column >= 0:
            row = via[column]
            sender_of[column] = row
            receiver_of[row], column = column, receiver_of[row]
    for column in range(size):
        seconds = activations[before[sender_of[column]], after[column]]
        if seconds > longest:
            one, other, longest = int(before[sender_of[column]]), int(after[column]), seconds
    return one, other, longest


@entry(makes_arrays=True)
def mean_of_pairs(activations: Floats, before: Ints, after: Ints) -> float:
    """The least mean of a matching's pairs (Kuhn 1955, by shortest augmenting paths)."""
    size = len(before)
    sender_of = np.full(size + 1, -1)  # by receiver; the last one is where each search begins
    of_sender, of_receiver = np.zeros(size), np.zeros(size + 1)  # dual prices
    reach, via = np.empty(size + 1), np.empty(size + 1, np.int64)
    done = np.empty(size + 1, np.bool_)
    for sender in range(size):
        column = size
        sender_of[column] = sender
        reach[:] = np.inf
        done[:] = False
        while sender_of[column] >= 0:
            done[column] = True
            row, least, nearest = sender_of[column], np.inf, -1
            for to in range(size):
                if done[to]:
                    continue
                seconds = activations[before[row], after[to]] - of_sender[row] - of_receiver[to]
                if seconds < reach[to]:
                    reach[to], via[to] = seconds, column
                if nearest < 0 or reach[to] < least:
                    least, nearest = reach[to], to
            for to in range(size + 1):
                if done[to]:
                    of_sender[sender_of[to]] += least
                    of_receiver[to] -= least
                else:
                    reach[to] -= least
            column = nearest
        while column != size:
            past = via[column]
            sender_of[column] = sender_of[past]
            column = past
        sender_of[size] = -1
    total = 0.0
    for to in range(size):
        total += activations[before[sender_of[to]], after[to]]
    return total / size
