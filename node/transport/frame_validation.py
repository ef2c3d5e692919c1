"""Which frames a node takes: pure, decided from the plan before a byte is stored."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dtfm.kernels.codec import DTYPES, Codec, encoded_bytes
from dtfm.node.training.placement import Group, Share
from dtfm.protos.frame import FrameError, FrameProblem, Header, Kind

PIECE_ELEMENTS = 1 << 21
"""A shard travels, and is summed, in pieces of at most so many elements: memory for a few of these is all that reducing takes
beside the gradients. Of several frames under most codecs, so that a link's pace can be told from them."""


@dataclass(frozen=True, slots=True)
class Expectations:
    """What the plan has the peers of one node send it.

    ``input_elements`` and ``output_elements`` are those of one micro-batch's activation before and after this stage;
    ``bucket_elements`` the parameters in each bucket held here.
    """

    share: Share
    groups: Mapping[int, Group]
    bucket_elements: Mapping[int, int]
    input_elements: int
    output_elements: int
    activation_dtype: torch.dtype
    parameter_dtype: torch.dtype


def shards(elements: int, members: int) -> list[tuple[int, int]]:
    """Half-open ranges that divide a bucket among the members of its group, equal but for rounding.

    Shard i belongs to member i: it sums that range for all (arXiv 2206.01288, section 3.2: each device acts as the
    parameter server of one shard). Borders fall on multiples of 256, a codec's block.
    """
    borders = [min(elements, -(-elements * i // (members * 256)) * 256) for i in range(members)] + [elements]
    return [(borders[i], borders[i + 1]) for i in range(members)]


@functools.lru_cache(maxsize=4096)
def pieces(elements: int, members: int) -> tuple[tuple[int, int], ...]:
    """The shards in pieces of at most PIECE_ELEMENTS, as half-open ranges: the first of each shard, the second of each, and so
    on, so that piece i is the sum of member i % members. Those past a shorter shard's end are empty."""
    divided = shards(elements, members)
    rounds = max(1, max(-(-(stop - start) // PIECE_ELEMENTS) for start, stop in divided))
    return tuple(
        (min(start + number * PIECE_ELEMENTS, stop), min(start + (number + 1) * PIECE_ELEMENTS, stop))
        for number in range(rounds)
        for start, stop in divided
    )


def admit(expect: Expectations, applied: int, source: str, header: Header) -> None:
    """Raises FrameError unless the plan has ``source`` send exactly this tensor about now.

    ``applied`` is the last step this node has applied. A peer is at most one commit ahead: it may send for the step after
    the one that runs here, never further, because this node's vote is needed for that.
    """
    share = expect.share
    if header.generation < share.generation:
        raise FrameError(FrameProblem.STALE, f"generation {header.generation}; this is {share.generation}")
    if header.generation > share.generation:
        raise FrameError(
            FrameProblem.UNKNOWN_GENERATION, f"generation {header.generation}; this node has {share.generation}"
        )
    earliest = applied if header.kind is Kind.EVALUATION else applied + 1
    if header.step < earliest:
        raise FrameError(FrameProblem.STALE, f"{header.kind.name} of step {header.step}; {applied} is applied")
    if header.step > earliest + 1:
        raise FrameError(FrameProblem.UNEXPECTED, f"{header.kind.name} of step {header.step}; {applied} is applied")
    senders, elements, dtype = _plan_has(expect, header)
    if source not in senders:
        raise FrameError(
            FrameProblem.UNEXPECTED,
            f"{header.kind.name} {header.index} part {header.part} from {source}; the plan has "
            f"{' or '.join(senders) or 'nobody'} send it here",
        )
    if DTYPES.get(header.dtype) != dtype or header.elements != elements:
        raise FrameError(
            FrameProblem.UNEXPECTED,
            f"{header.kind.name} {header.index} has {elements} elements of {dtype}, not {header.elements} of "
            f"{DTYPES.get(header.dtype, header.dtype)}",
        )
    try:
        codec = Codec(header.codec)
    except ValueError:
        raise FrameError(FrameProblem.MALFORMED, f"codec {header.codec} does not exist") from None
    if codec.sparse and header.kind not in (Kind.REDUCE, Kind.GATHER):
        raise FrameError(
            FrameProblem.UNEXPECTED,
            f"{header.kind.name} {header.index} under {codec.name.lower()}, which is for gradients that replicas exchange",
        )
    total = encoded_bytes(codec, elements, dtype)
    if header.total != total:
        raise FrameError(FrameProblem.MALFORMED, f"{header.total} bytes encoded; codec and elements make {total}")


def _plan_has(expect: Expectations, header: Header) -> tuple[tuple[str, ...], int, torch.dtype]:
    """Who may send the tensor that the header names, its elements and dtype; nobody when the plan has no such tensor."""
    share = expect.share
    nobody: tuple[str, ...] = ()
    if header.kind in (Kind.REDUCE, Kind.GATHER):
        group = expect.groups.get(header.index)
        cut = pieces(expect.bucket_elements[header.index], len(group.members)) if group is not None else ()
        if group is None or header.part >= len(cut):
            return nobody, 0, expect.parameter_dtype
        start, stop = cut[header.part]
        owner = group.members[header.part % len(group.members)]
        if header.kind is Kind.GATHER:
            senders = nobody if owner == share.node else (owner,)
        else:
            senders = tuple(n for n in group.members if n != owner) if owner == share.node else nobody
        return senders, stop - start, expect.parameter_dtype
    match header.kind:
        case Kind.ACTIVATION:
            sender, elements = share.previous.get(header.index), expect.input_elements
        case Kind.EVALUATION:
            sender, elements = share.evaluation_previous.get(header.index), expect.input_elements
        case Kind.GRADIENT:
            sender, elements = share.next.get(header.index), expect.output_elements
        case _:
            sender, elements = None, 0
    return (sender,) if sender else nobody, elements, expect.activation_dtype
