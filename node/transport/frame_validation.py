"""Which frames a node accepts: a pure decision, made from the plan before a byte is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dtfm.kernels.codec import DTYPES, Codec, encoded_bytes
from dtfm.node.model.bucket import UPDATES_DTYPE
from dtfm.node.model.placement import Placement, matrix_pieces
from dtfm.node.model.stage import Stage
from dtfm.protos.frame import FrameError, FrameProblem, Header, Kind
from dtfm.protos.outer import MOST_OUTER_STEPS


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """The tensors that a node exchanges, in elements: one micro-batch's activation before and after its stage, and the
    parameters of each bucket that it holds. Activations and their gradients have type ``dtype``, and the parameters' gradients
    type ``reduced``. ``matrices``: by bucket, the elements of each matrix that Muon updates."""

    input: int
    output: int
    buckets: Mapping[int, int]
    dtype: torch.dtype
    reduced: torch.dtype
    matrices: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def tensor_sizes(stage: Stage, micro_batch: int) -> TensorSizes:
    shape = stage.model.activation_shape
    return TensorSizes(
        input=math.prod(shape(stage.first - 1, micro_batch)) if stage.first else 0,
        output=math.prod(shape(stage.past_last - 1, micro_batch)),
        buckets={index: bucket.spec.size for index, bucket in stage.buckets.items()},
        dtype=stage.dtype,
        reduced=next(iter(stage.buckets.values())).parameters.dtype,
        matrices={index: bucket.spec.matrix_sizes for index, bucket in stage.buckets.items()},
    )


@dataclass(frozen=True, slots=True)
class Expectations:
    """What the plan has the peers of one node send it. ``sparse``: islands exchange under a sparse codec."""

    placement: Placement
    sizes: TensorSizes
    sparse: bool = False


def validate(expect: Expectations, applied: int, source: str, header: Header) -> None:
    """Raises FrameError unless the plan has ``source`` send exactly this tensor at this time.

    ``applied`` is the last step that this node has applied. A peer is at most one commit ahead, because every commit needs
    this node's vote: it may send for the step after the one that runs here, but no later one.
    """
    generation = expect.placement.generation
    if header.generation < generation:
        raise FrameError(FrameProblem.STALE, f"generation {header.generation}; this is {generation}")
    if header.generation > generation:
        raise FrameError(FrameProblem.UNKNOWN_GENERATION, f"generation {header.generation}; this node has {generation}")
    earliest = applied if header.kind is Kind.EVALUATION else applied + 1
    if header.step < earliest:
        raise FrameError(FrameProblem.STALE, f"{header.kind.name} of step {header.step}; {applied} is applied")
    if header.step > earliest + 1:
        raise FrameError(FrameProblem.UNEXPECTED, f"{header.kind.name} of step {header.step}; {applied} is applied")
    senders, elements = _in_plan(expect, header)
    if source not in senders:
        raise FrameError(
            FrameProblem.UNEXPECTED,
            f"{header.kind.name} {header.index} part {header.part} from {source}; the plan has "
            f"{' or '.join(senders) or 'nobody'} send it here",
        )
    reduced = dict.fromkeys((Kind.REDUCE, Kind.GATHER), expect.sizes.reduced) | {Kind.ORTHOGONAL: UPDATES_DTYPE}
    dtype = reduced.get(header.kind, expect.sizes.dtype)
    if DTYPES.get(header.dtype) != dtype or header.elements != elements:
        raise FrameError(
            FrameProblem.UNEXPECTED,
            f"{header.kind.name} {header.index} has {elements} elements of {dtype}, not {header.elements} of "
            f"{DTYPES.get(header.dtype, header.dtype)}",
        )
    codec = encoded_with(header, elements, dtype)
    if header.kind is Kind.ORTHOGONAL and codec is not Codec.OFF:
        raise FrameError(FrameProblem.UNEXPECTED, f"{header.kind.name} {header.index} under {codec.name.lower()}")
    is_sparse = expect.sparse and header.kind is Kind.REDUCE and expect.placement.rounds.exchanges(header.step)
    if codec.sparse and not is_sparse:
        raise FrameError(
            FrameProblem.UNEXPECTED,
            f"{header.kind.name} {header.index} under {codec.name.lower()}, which is only for exchanges between islands",
        )


def encoded_with(header: Header, elements: int, dtype: torch.dtype) -> Codec:
    """The codec that the header names. Raises FrameError for an unknown codec, or a total that does not fit ``elements``."""
    try:
        codec = Codec(header.codec)
    except ValueError:
        raise FrameError(FrameProblem.MALFORMED, f"codec {header.codec} does not exist") from None
    if header.total != (total := encoded_bytes(codec, elements, dtype)):
        raise FrameError(FrameProblem.MALFORMED, f"{header.total} bytes encoded; codec and elements make {total}")
    return codec


def _in_plan(expect: Expectations, header: Header) -> tuple[tuple[str, ...], int]:
    """The nodes that may send the tensor that the header names, none if the plan has no such tensor; and its elements."""
    placement, sizes = expect.placement, expect.sizes
    exchanges = placement.rounds.exchanges(header.step)
    if header.kind in (Kind.REDUCE, Kind.GATHER):
        groups = placement.exchange_groups if exchanges else placement.groups
        if (group := groups.get(header.index)) is None:
            return (), 0
        start, stop = group.piece(sizes.buckets[header.index], header.part)
        owner, to_all = group.owner(header.part), expect.sparse and exchanges
        is_mine = to_all or owner == placement.node
        if stop == start or is_mine != (header.kind is Kind.REDUCE):
            return (), 0
        adding = [group.members[rank] for rank in group.senders(header.part)] if to_all else group.members
        return tuple(n for n in adding if n != placement.node) if is_mine else (owner,), stop - start
    match header.kind:
        case Kind.ORTHOGONAL if not exchanges and header.index in placement.groups:
            members = placement.groups[header.index].members
            sent = matrix_pieces(sizes.matrices.get(header.index, ()), len(members))
            if header.part >= len(sent) or (owner := members[sent[header.part].owner]) == placement.node:
                return (), 0
            return (owner,), sent[header.part].stop - sent[header.part].start
        case Kind.ACTIVATION if not exchanges:
            sender, elements = placement.previous.get(header.index), sizes.input
        case Kind.EVALUATION:
            sender, elements = placement.evaluation_previous.get(header.index), sizes.input
        case Kind.LOOK if exchanges and header.index in placement.looked and header.part < MOST_OUTER_STEPS:
            sender, elements = placement.previous.get(header.index), sizes.input
        case Kind.GRADIENT if not exchanges:
            sender, elements = placement.next.get(header.index), sizes.output
        case _:
            sender, elements = None, 0
    return (sender,) if sender else (), elements
