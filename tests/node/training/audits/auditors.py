"""Audits among the nodes of one process: the coordinator's requests, made from the votes, and the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dtfm.node.training.audits.step_again import do_again, misfit
from dtfm.node.transport.commitments import COMMITMENT_BYTES, commitment
from dtfm.node.transport.kept import Tensor, Wanted, Withheld
from dtfm.protos.control_pb2 import Audit, Audited, StepReady
from dtfm.protos.frame import Kind
from dtfm.protos.peer_pb2 import KeptRequest
from tests.node.in_process import InProcess

#: (peer, kind, index, part)
Place = tuple[str, Kind, int, int]


def digests(passed: Iterable[StepReady.Passed]) -> dict[Place, bytes]:
    found = {}
    for each in passed:
        for number, (index, part) in enumerate(zip(each.indices, each.parts, strict=True)):
            digest = each.digests[number * COMMITMENT_BYTES : (number + 1) * COMMITMENT_BYTES]
            found[each.peer, Kind(each.kind), index, part] = digest
        assert len(each.digests) == len(each.indices) * COMMITMENT_BYTES
    return found


@dataclass
class Auditors:
    """The next step of ``nodes``, trained and voted on. ``fetched`` are the tensors that an audit needed."""

    nodes: InProcess
    fetched: list[Wanted] = field(default_factory=list)

    def __post_init__(self) -> None:
        done = self.nodes.train_unfinished()
        self.votes = {
            name: generation.vote(self.step, *done[name], b"") for name, generation in self.nodes.generations.items()
        }
        self.sent = {name: digests(vote.sent) for name, vote in self.votes.items()}
        self.received = {name: digests(vote.received) for name, vote in self.votes.items()}

    @property
    def step(self) -> int:
        return self.nodes.step + 1

    def asked(self, node: str, numbers: Sequence[int] | None = None, bucket: int | None = None) -> Audit:
        """The audit of ``node``'s work on these micro-batches, by default its whole share, and of its gradients in the
        ``bucket``."""
        placement = self.nodes.generations[node].placement
        sent, received = self.sent[node], self.received[node]
        losses = dict(zip(placement.micro_batches, self.votes[node].losses, strict=False))
        pieces = {
            part: digest for (_, kind, index, part), digest in sent.items() if (kind, index) == (Kind.REDUCE, bucket)
        }
        return Audit(
            number=5,
            generation=placement.generation,
            step=self.step,
            node=node,
            bucket=bucket,
            pieces=[Audit.Piece(piece=part, digest=digest, bucket=bucket) for part, digest in sorted(pieces.items())],
            sums=[] if bucket is None else self._sums(node, bucket),
            micro_batches=[
                Audit.MicroBatch(
                    number=n,
                    previous=placement.previous.get(n, ""),
                    next=placement.next.get(n, ""),
                    activation_in=received.get((placement.previous.get(n, ""), Kind.ACTIVATION, n, 0)),
                    activation_out=sent.get((placement.next.get(n, ""), Kind.ACTIVATION, n, 0)),
                    gradient_in=received.get((placement.next.get(n, ""), Kind.GRADIENT, n, 0)),
                    gradient_out=sent.get((placement.previous.get(n, ""), Kind.GRADIENT, n, 0)),
                    loss=losses.get(n),
                )
                for n in (placement.micro_batches if numbers is None else numbers)
            ],
        )

    def asked_of_round(self, node: str, bucket: int, trained: Sequence[Audit.Trained]) -> Audit:
        """The audit of ``node``'s changes in an exchange, after it had ``trained`` these steps."""
        audit = self.asked(node, (), bucket)
        for (_, kind, index, part), digest in sorted(self.sent[node].items()):
            if kind == Kind.REDUCE and index != bucket:
                audit.pieces.add(piece=part, digest=digest, bucket=index)
        audit.trained.extend(trained)
        return audit

    def _sums(self, node: str, bucket: int) -> list[Audit.Sum]:
        owned = {part for _, kind, index, part in self.sent[node] if (kind, index) == (Kind.GATHER, bucket)}
        placement = self.nodes.generations[node].placement
        groups = placement.exchange_groups if placement.rounds.exchanges(self.step) else placement.groups
        others = set(groups[bucket].members) - {node}
        return [
            Audit.Sum(
                piece=part,
                addends=[
                    Audit.Addend(node=other, digest=self.sent[other][node, Kind.REDUCE, bucket, part])
                    for other in sorted(others)
                ],
            )
            for part in sorted(owned)
        ]

    def answer(self, by: str, audit: Audit) -> Audited:
        generation = self.nodes.generations[by]
        assert not (wrong := misfit(audit, generation, self.step)), wrong
        self.fetched.clear()
        return do_again(audit, generation, self.fetch)

    def fetch(self, wanted: Sequence[Wanted]) -> Sequence[Tensor]:
        self.fetched += wanted
        return [self._find(each) for each in wanted]

    def _find(self, wanted: Wanted) -> Tensor:
        holder = self.nodes.generations[wanted.node]
        request = KeptRequest(
            generation=holder.number, step=self.step, kind=wanted.kind, index=wanted.index, part=wanted.part
        )
        try:
            header, encoded = holder.offer(self.step).find(request)
        except LookupError as error:
            raise Withheld(wanted.node, str(error)) from None
        if commitment(header.codec, encoded) != wanted.digest:
            raise Withheld(wanted.node, "another tensor")
        # As it would come from elsewhere: in memory of its own.
        return header, memoryview(bytearray(encoded))


def errors(answer: Audited) -> tuple[float, float, float, float]:
    """Of activations, gradients, addends and losses."""
    assert not answer.problem, answer
    return answer.activations, answer.gradients, answer.addends, answer.losses
