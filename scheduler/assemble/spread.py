"""Spreads micro-batches over all links between two stages where the nearest links cannot carry them in time."""

from __future__ import annotations

import numpy as np

from dtfm.scheduler.model.problem import Floats, Ints

TRIES = 6
"""Halvings of the gap between the best possible time and the best one found."""

Counts = list[list[int]]


def spread(cost: Floats, pace: Floats, known: Ints, free: float) -> Ints:
    """Divides the micro-batches so that the busiest link is busy for as short a time as possible.

    ``known`` is int64 [senders, receivers], the number of micro-batches on each link; its row and column sums are kept.
    ``pace`` [senders, receivers] is a link's seconds per micro-batch, infinite where it does not exist. A link may be busy for
    ``free`` seconds without cost. Within that, and wherever there is a choice, links of little ``cost`` are filled first.

    Returns ``known`` itself when no link needs relief.
    """
    used = known > 0
    longest = float((known[used] * pace[used]).max())
    if longest <= free or not np.isfinite(longest):
        return known
    rows, columns = known.sum(axis=1), known.sum(axis=0)
    rates = 1.0 / np.maximum(pace, 1e-300)
    # A node without micro-batches may have no links either.
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
    """Numbers per row and column with at most ``room`` on each link, or None where that is impossible.

    Fills links in ``order``, then moves the rest by augmenting paths (Ford and Fulkerson 1956).
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
    """The shortest augmenting path from a row with something left to a column that lacks something, or None.

    Alternates between links that take one more and links that give one up.
    """
    came: dict[int, tuple[int, int]] = {}  # per column: the row before it, and the column by which that row was reached
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
