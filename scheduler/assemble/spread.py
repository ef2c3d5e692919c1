"""Micro-batches over all links between two stages at once, where the links that are nearest could not carry them in time."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.problem import Floats, Ints

TRIES = 6
"""Halvings of the gap between what the links could carry at best and what is known to work."""

Counts = list[list[int]]


def spread(cost: Floats, pace: Floats, known: Ints, free: float) -> Ints:
    """As ``known``, but shared out such that the link that is busy longest is so for about as short as possible.

    ``known`` int64 [senders, receivers] says how many micro-batches take each link; row and column sums stay. ``pace``
    [senders, receivers] is how long a link takes for one, infinite where there is none. Nobody minds a link that is busy
    for no more than ``free`` seconds, so that within these, and wherever there is a choice, links of little ``cost`` are
    filled first.
    """
    used = known > 0
    longest = float((known[used] * pace[used]).max())
    if longest <= free or not np.isfinite(longest):
        return known
    rows, columns = known.sum(axis=1), known.sum(axis=0)
    rates = 1.0 / np.maximum(pace, 1e-300)
    # Whoever has no micro-batches may have no links either.
    out_of, into = np.where(rows, rates.sum(axis=1), 1.0), np.where(columns, rates.sum(axis=0), 1.0)
    least = max(free, float((rows / out_of).max()), float((columns / into).max()))
    order = [divmod(place, len(columns)) for place in np.argsort(cost, axis=None, kind="stable").tolist()]
    best, low, high = known, least, longest
    seconds = least
    for _ in range(TRIES):
        room = np.minimum(seconds * rates + 1e-9, known.sum()).astype(np.int64)
        found = _carried(order, room.tolist(), rows.tolist(), columns.tolist())
        if found is None:
            low = seconds
        else:
            best, high = np.array(found, dtype=np.int64), seconds
        seconds = (low + high) / 2
    return best


def _carried(order: list[tuple[int, int]], room: Counts, rows: list[int], columns: list[int]) -> Counts | None:
    """So many per row and column with no more on a link than it has ``room`` for; None where that is impossible.

    Links are filled in ``order``; then what is left over makes its way by augmenting paths (Ford and Fulkerson 1956).
    """
    taken = [[0] * len(columns) for _ in rows]
    for row, column in order:
        count = min(rows[row], columns[column], room[row][column])
        taken[row][column] = count
        rows[row] -= count
        columns[column] -= count
    while any(rows):
        path = _path(taken, room, rows, columns)
        if path is None:
            return None
        forward, back = path[::2], path[1::2]
        count = min(
            rows[path[0][0]],
            columns[path[-1][1]],
            *(room[row][column] - taken[row][column] for row, column in forward),
            *(taken[row][column] for row, column in back),
        )
        for row, column in forward:
            taken[row][column] += count
        for row, column in back:
            taken[row][column] -= count
        rows[path[0][0]] -= count
        columns[path[-1][1]] -= count
    return taken


def _path(taken: Counts, room: Counts, rows: list[int], columns: list[int]) -> list[tuple[int, int]] | None:
    """From a row with something left to a column that lacks something: the links that take one more and that give one up, in
    turn; the shortest such way, or None."""
    came: dict[int, tuple[int, int]] = {}  # to each column: from which row, and by which column that row was reached
    seen = {row for row, left in enumerate(rows) if left}
    queue = [(row, -1) for row in sorted(seen)]
    for row, by in queue:
        for column in range(len(columns)):
            if column in came or taken[row][column] >= room[row][column]:
                continue
            came[column] = row, by
            if columns[column]:
                path = []
                while column >= 0:
                    row, by = came[column]
                    path.append((row, column))
                    if by >= 0:
                        path.append((row, by))
                    column = by
                return path[::-1]
            for other in range(len(rows)):
                if other not in seen and taken[other][column]:
                    seen.add(other)
                    queue.append((other, column))
    return None
