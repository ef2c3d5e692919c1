"""Repeats another replica's work on a step, and compares the results.

The neighbours hand out the inputs that they sent. The results are compared with the tensors that the replica voted to have sent:
first by digest, and by value if the digests differ. This happens after this node's own vote and adds nothing to any gradient,
since the sums that were voted for are applied next. Memory also holds one micro-batch, and the gradients of one bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from dtfm.kernels.codec import DTYPES, Codec, codec_named, decode, encode
from dtfm.node.model.optimizer.optimizer import change_since_exchange
from dtfm.node.model.placement import Group, Placement
from dtfm.node.training.audits.round_again import SetAside, round_done_again
from dtfm.node.training.codec_choice import GENTLEST_FIRST
from dtfm.node.training.generation import Generation
from dtfm.node.training.step.compute import Compute, compute_step
from dtfm.node.transport.commitments import commitment
from dtfm.node.transport.kept import Tensor, Wanted, Withheld
from dtfm.protos.control_pb2 import Audit, Audited
from dtfm.protos.frame import Kind
from dtfm.protos.peer_pb2 import KeptRequest

#: fetch(tensors), all at once. Raises Withheld, and Closed when called off.
Fetch = Callable[[Sequence[Wanted]], Sequence[Tensor]]

LARGEST_ERROR = 1e9
"""What is further off, or no number, counts as this far off."""

NOTHING_COMPARED = -1.0


def misfit(audit: Audit, generation: Generation | None, voted: int | None) -> str:
    """Why this node cannot repeat the work that ``audit`` names, having ``voted`` on that step; empty if it can try."""
    if generation is None or voted is None or (audit.generation, audit.step) != (generation.number, voted):
        at = f"step {voted} of generation {generation.number}" if generation is not None and voted else "no step"
        return f"it is of step {audit.step} of generation {audit.generation}; this node has voted on {at}"
    placement = generation.placement
    if generation.commitments is None:
        return "nothing is audited in this step"
    buckets = {piece.bucket for piece in audit.pieces} | ({audit.bucket} if audit.HasField("bucket") else set[int]())
    if strange := sorted(buckets - generation.stage.buckets.keys()):
        return f"buckets {strange[:8]} are not of this stage"
    if placement.rounds.exchanges(audit.step):
        return _misfit_of_exchange(audit, placement)
    if audit.node == placement.node or audit.node not in placement.replicas:
        return f"{audit.node[:64]!r} is no other replica of this stage"
    numbers, most = [each.number for each in audit.micro_batches], placement.all_micro_batches
    if not numbers or len(set(numbers)) < len(numbers) or max(numbers) >= most:
        return f"micro-batches {numbers[:8]}; a step has {most}, each once"
    for each in audit.micro_batches:
        if (bool(each.previous), bool(each.next)) != (not placement.first, not placement.last):
            return f"micro-batch {each.number} has other neighbours than one of stage {placement.stage}"
    return ""


def _misfit_of_exchange(audit: Audit, placement: Placement) -> str:
    if not audit.HasField("bucket"):
        return f"step {audit.step} is an exchange, and it names no bucket"
    group = placement.exchange_groups[audit.bucket]
    if audit.node == placement.node or audit.node not in group.members:
        return f"{audit.node[:64]!r} is no other node that exchanges bucket {audit.bucket}"
    if audit.node in placement.replicas:
        return ""
    if placement.stages > 1:
        return "this node does not have the whole model, to do the steps of another island again"
    steps, of_step = audit.step - 1 - placement.rounds.rested(audit.step - 1), placement.all_micro_batches
    numbers = [sum(step.borders[1::2]) - sum(step.borders[::2]) for step in audit.trained]
    if len(numbers) != steps or not all(0 < number <= of_step for number in numbers):
        return f"it names {numbers[:8]} micro-batches of steps; {steps} steps came before this exchange, of {of_step} at most"
    return ""


def do_again(
    audit: Audit,
    generation: Generation,
    fetch: Fetch,
    is_late: Callable[[], bool] = lambda: False,
    set_aside: SetAside = lambda _: nullcontext(),
) -> Audited:
    """The answer to ``audit``, which fits. In the thread that trains. Once it ``is_late``, the audit stops. While this
    node has another's state, its own is ``set_aside``. Raises the errors of ``fetch``, except Withheld."""
    compute = compute_step(generation.loaded, generation.placement, generation.stage, audit.step)
    again = _Again(audit, generation, compute, fetch, is_late, set_aside)
    answer = Audited(number=audit.number)
    try:
        again.run()
    except Withheld as withheld:
        answer.problem, answer.withheld_by = f"WITHHELD: {withheld}", withheld.node
        answer.unreachable = withheld.unreachable
    except Unusable as unusable:
        answer.problem = f"UNUSABLE: {unusable}"
    errors = again.errors
    answer.activations, answer.gradients = errors[Kind.ACTIVATION], errors[Kind.GRADIENT]
    answer.addends, answer.losses = errors[Kind.REDUCE], again.losses
    return answer


class Unusable(Exception):
    """Nobody can audit this, and nobody is at fault."""


@dataclass(slots=True)
class _Again:
    """``errors`` are the largest so far, by kind of tensor; ``losses`` is the largest error of the losses."""

    audit: Audit
    generation: Generation
    compute: Compute
    fetch: Fetch
    is_late: Callable[[], bool]
    set_aside: SetAside
    losses: float = NOTHING_COMPARED
    errors: dict[Kind, float] = field(
        default_factory=lambda: dict.fromkeys((Kind.ACTIVATION, Kind.GRADIENT, Kind.REDUCE), NOTHING_COMPARED)
    )

    def run(self) -> None:
        if not self.audit.HasField("bucket") or self._is_summed_roughly(self.audit.bucket):
            for each in self.audit.micro_batches:
                self._micro_batch(each, (), ())
            return
        index, others = self.audit.bucket, {piece.bucket for piece in self.audit.pieces} - {self.audit.bucket}
        unusable: list[Unusable] = []  # the rest is still compared
        again = round_done_again(self.generation, self.audit.trained, self._go_on, self.set_aside)
        with again if self.audit.trained else nullcontext():
            for bucket in (*sorted(others), index):
                total = self._total(bucket)
                pieces = (piece for piece in self.audit.pieces if piece.bucket == bucket)
                _try_all((partial(self._piece, bucket, piece, total) for piece in pieces), unusable)
        _try_all((partial(self._sum, index, summed, total) for summed in self.audit.sums), unusable)
        if unusable:
            raise unusable[0]

    def _total(self, index: int) -> torch.Tensor:
        """The gradients that the audited node adds to a bucket, or the changes that it brings into its exchange."""
        bucket, placement = self.generation.stage.buckets[index], self.generation.placement
        total = torch.zeros_like(bucket.gradients)
        if not self._exchanges:
            sums = tuple(bucket.views(total).values())
            for each in self.audit.micro_batches:
                self._micro_batch(each, self.generation.stage.parameters[index], sums)
            return total
        group = placement.exchange_groups[index]
        island = group.islands[group.members.index(self.audit.node)]
        share = placement.share_in_exchange(index, self.generation.codecs.exchange, self.audit.step, island)
        change_since_exchange(bucket, share, total)
        return total

    def _go_on(self) -> None:
        if self.is_late():
            raise Unusable("this node cannot do this much in the time that it has")

    def _is_summed_roughly(self, index: int) -> bool:
        """Whether its gradients depend too much on the number of threads. On a CPU, torch sums a norm's gradients in bfloat16.
        For 4096 tokens the sums differ by 8 %, which shows in a bucket with only norms."""
        vectors = all(len(shape) < 2 for _, shape in self.generation.stage.buckets[index].spec.parameters)
        return vectors and not self._exchanges and self.generation.stage.dtype == torch.bfloat16

    def _micro_batch(
        self, each: Audit.MicroBatch, parameters: Sequence[torch.nn.Parameter], sums: Sequence[torch.Tensor]
    ) -> None:
        """Compares the micro-batch's results, and adds the gradients of ``parameters`` to ``sums``."""
        self._go_on()
        placement, compute = self.generation.placement, self.compute
        x, given = self._inputs(each)
        if placement.last:
            scored = compute.loss(each.number, x, parameters)
            root, mine = scored.weighted, float(scored.mean)
            self.losses = max(self.losses, _error(each.loss - mine, mine))
        else:
            root = compute.forward(each.number, x)
            self._compare(Kind.ACTIVATION, each.number, 0, root.detach(), each.activation_out)
        leaves = [*parameters] if placement.first else [x, *parameters]
        if not leaves:
            return
        found = list(torch.autograd.grad(root, leaves, given, allow_unused=True))
        del root
        if not placement.first:
            entered = found.pop(0)
            self._compare(
                Kind.GRADIENT,
                each.number,
                0,
                entered if entered is not None else torch.zeros_like(x),
                each.gradient_out,
            )
        for total, gradient in zip(sums, found, strict=True):
            if gradient is not None:
                total.add_(gradient)

    def _inputs(self, each: Audit.MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input of the micro-batch (a leaf that gets a gradient, unless it is data), and the gradient of its output; None
        on the last stage."""
        placement, compute, sizes = self.generation.placement, self.compute, self.generation.sizes
        wanted = []
        if not placement.first:
            digest = each.activation_in
            wanted.append(Wanted(each.previous, Kind.ACTIVATION, each.number, 0, digest, sizes.input, sizes.dtype))
        if not placement.last:
            digest = each.gradient_in
            wanted.append(Wanted(each.next, Kind.GRADIENT, each.number, 0, digest, sizes.output, sizes.dtype))
        came = [self._decoded(wanted, tensor) for wanted, tensor in zip(wanted, self.fetch(wanted), strict=True)]
        given = None if placement.last else came.pop().view(compute.output_shape)
        if placement.first:
            return compute.inputs(each.number), given
        return came.pop().view(compute.input_shape).requires_grad_(), given

    def _piece(self, bucket: int, piece: Audit.Piece, total: torch.Tensor) -> None:
        group = self._group(bucket)
        start, stop = group.piece(total.numel(), piece.piece)
        if stop == start or group.owner(piece.piece) == self.audit.node:
            raise Unusable(f"piece {piece.piece} of bucket {bucket} is not sent by {self.audit.node}")
        self._compare(Kind.REDUCE, bucket, piece.piece, total[start:stop], piece.digest)

    def _sum(self, bucket: int, wanted: Audit.Sum, total: torch.Tensor) -> None:
        """Adds up a piece as its owner, which is audited, should have: in the group's order, with its own share out of ``total``.
        This node has the owner's sum: the sum has replaced this node's gradients."""
        group, own = self._group(bucket), self.generation.stage.buckets[bucket].gradients
        start, stop = group.piece(total.numel(), wanted.piece)
        digests = {addend.node: addend.digest for addend in wanted.addends}
        others = set(group.members) - {self.audit.node}
        if group.owner(wanted.piece) != self.audit.node or digests.keys() != others:
            raise Unusable(f"{self.audit.node} does not add up piece {wanted.piece} of bucket {bucket} of these nodes'")
        mine = torch.zeros_like(own[start:stop])
        for member in group.members:
            if member == self.audit.node:
                mine.add_(total[start:stop])
                continue
            addend = Wanted(member, Kind.REDUCE, bucket, wanted.piece, digests[member], stop - start, own.dtype)
            tensor = self._own(addend) if member == self.generation.placement.node else self.fetch([addend])[0]
            mine.add_(self._decoded(addend, tensor))
        found = []
        for codec in self._codecs(Kind.REDUCE):
            encoded = encode(codec, mine)
            decoded = decode(encoded.codec, encoded.data, mine.numel(), mine.dtype, mine.device)
            found.append(relative_error(own[start:stop], decoded))
        self._note(Kind.REDUCE, min(found))

    @property
    def _exchanges(self) -> bool:
        return self.generation.placement.rounds.exchanges(self.audit.step)

    def _group(self, bucket: int) -> Group:
        placement = self.generation.placement
        return (placement.exchange_groups if self._exchanges else placement.groups)[bucket]

    def _own(self, addend: Wanted) -> Tensor:
        generation, step = self.generation, self.audit.step
        request = KeptRequest(
            generation=generation.number, step=step, kind=addend.kind, index=addend.index, part=addend.part
        )
        try:
            return generation.offer(step).find(request)
        except LookupError as error:
            raise Unusable(f"this node has given up what it sent: {error}") from None

    def _compare(self, kind: Kind, index: int, part: int, mine: torch.Tensor, digest: bytes) -> None:
        """Compares ``mine`` with the audited node's tensor of that digest."""
        self._note(kind, self._difference(kind, index, part, mine, digest))

    def _note(self, kind: Kind, error: float) -> None:
        self.errors[kind] = max(self.errors[kind], error)

    def _difference(self, kind: Kind, index: int, part: int, mine: torch.Tensor, digest: bytes) -> float:
        for codec in self._codecs(kind):
            encoded = encode(codec, mine)
            if commitment(encoded.codec, encoded.data) == digest:
                return 0.0
        wanted = Wanted(self.audit.node, kind, index, part, digest, mine.numel(), mine.dtype)
        (tensor,) = self.fetch([wanted])
        encoded = encode(Codec(tensor[0].codec), mine)
        ours = decode(encoded.codec, encoded.data, mine.numel(), mine.dtype, mine.device)
        return relative_error(self._decoded(wanted, tensor), ours)

    def _codecs(self, kind: Kind) -> tuple[Codec, ...]:
        """The codecs that the audited node may have used: it has chosen by its own links."""
        network = self.generation.run.network
        if self._exchanges:
            return (codec_named(network.exchange),)
        settings = {
            Kind.ACTIVATION: network.activations,
            Kind.GRADIENT: network.gradients,
            Kind.REDUCE: network.reduction,
        }
        return GENTLEST_FIRST if settings[kind] == "auto" else (codec_named(settings[kind]),)

    def _decoded(self, wanted: Wanted, tensor: Tensor) -> torch.Tensor:
        header, encoded = tensor
        try:
            return decode(
                Codec(header.codec), encoded, header.elements, DTYPES[header.dtype], self.generation.stage.device
            )
        except ValueError as error:  # bytes that no encoder makes
            raise Withheld(wanted.node, str(error)) from None


def _try_all(comparisons: Iterable[Callable[[], None]], unusable: list[Unusable]) -> None:
    for compare in comparisons:
        try:
            compare()
        except Unusable as why:
            unusable.append(why)


def relative_error(its: torch.Tensor, mine: torch.Tensor) -> float:
    """||its - mine|| / ||mine||, for flat tensors; at most LARGEST_ERROR."""
    wide = torch.promote_types(mine.dtype, torch.float32)
    difference, size = (
        float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        for tensor in (its.to(wide) - mine.to(wide), mine.to(wide))
    )
    return _error(difference, size)


def _error(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    error = abs(difference / size) if size else math.inf
    return min(error, LARGEST_ERROR) if not math.isnan(error) else LARGEST_ERROR
