"""How a bucket is divided among the members of its group, and into pieces small enough to reduce one by one."""

from __future__ import annotations

import functools

PIECE_ELEMENTS = 1 << 21
"""Most elements in a piece. Reducing takes memory for a few pieces beside the gradients. Under most codecs a piece is several
frames, so that a link's speed can be told from their arrival."""


def shards(elements: int, members: int) -> list[tuple[int, int]]:
    """Half-open ranges that divide a bucket among the members of its group, equal but for rounding.

    Shard i belongs to member i, which sums that range for all (arXiv 2206.01288, section 3.2: each device acts as the
    parameter server of one shard). Borders fall on multiples of 256, a codec's block.
    """
    borders = [min(elements, -(-elements * i // (members * 256)) * 256) for i in range(members)] + [elements]
    return [(borders[i], borders[i + 1]) for i in range(members)]


@functools.lru_cache(maxsize=4096)
def pieces(elements: int, members: int) -> tuple[tuple[int, int], ...]:
    """The shards cut into half-open ranges of at most PIECE_ELEMENTS.

    First comes the first piece of each shard, then the second of each, and so on: member i % members sums piece i. A shard with
    fewer pieces than the longest one is filled up with empty ranges.
    """
    divided = shards(elements, members)
    rounds = max(1, max(-(-(stop - start) // PIECE_ELEMENTS) for start, stop in divided))
    return tuple(
        (min(start + number * PIECE_ELEMENTS, stop), min(start + (number + 1) * PIECE_ELEMENTS, stop))
        for number in range(rounds)
        for start, stop in divided
    )
