"""What honest nodes vote to have sent and got, where work is audited, and what they answer to an audit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from blake3 import blake3

from dtfm.coordinator.core.audits import COMPARED
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.chains import chains, micro_batches_of
from dtfm.scheduler.model.plan import Plan

Hop = tuple[str, str, int, int, int]


@cache
def _by_node(plan: Plan, exchanges: bool) -> tuple[Mapping[str, list[Hop]], Mapping[str, list[Hop]]]:
    """By node, what it sends, and what it gets."""
    sent, received = defaultdict[str, list[Hop]](list), defaultdict[str, list[Hop]](list)
    for hop in hops(plan, exchanges=exchanges):
        sent[hop[0]].append(hop)
        received[hop[1]].append(hop)
    return sent, received


def hops(plan: Plan, *, exchanges: bool = False) -> list[Hop]:
    """The tensors that a step passes on: between stages, and a piece of each layer's bucket for each replica of its stage. In an
    exchange there is a piece for each node that has the layer."""
    found: list[Hop] = []
    for number, chain in enumerate(() if exchanges else chains(plan)):
        for before, after in pairwise(chain):
            found.append((before, after, Kind.ACTIVATION, number, 0))
            found.append((after, before, Kind.GRADIENT, number, 0))
    groups = [(bucket, stage.replicas) for stage in plan.stages for bucket in range(*stage.layers)]
    if exchanges:
        together = defaultdict[int, tuple[str, ...]](tuple)
        for bucket, replicas in groups:
            together[bucket] += replicas
        groups = [*together.items()]
    for bucket, members in groups:
        for piece, owner in enumerate(members):
            others = [node for node in members if node != owner]
            found += [(node, owner, Kind.REDUCE, bucket, piece) for node in others]
            found += [(owner, node, Kind.GATHER, bucket, piece) for node in others]
    return found


def digest(hop: Hop, salt: str = "") -> bytes:
    """The digest of a sum, which is the same for all receivers."""
    sender, receiver, kind, index, part = hop
    what = (sender, "" if kind == Kind.GATHER else receiver, kind, index, part)
    return blake3(f"{what}{salt}".encode()).digest(16)


def commitments(plan: Plan, node: str, loss: float = 0.5, *, exchanges: bool = False) -> dict[str, Any]:
    """Fields of an honest vote, in a step that trains or ``exchanges``; ``loss``: of each micro-batch."""
    (sent, received), mine = _by_node(plan, exchanges), len(micro_batches_of(plan).get(node, ()))
    scores = not exchanges and any(node in stage.replicas for stage in plan.last_stages)
    return {
        "sent": passed(sent[node], at=1),
        "received": passed(received[node], at=0),
        "losses": [loss] * mine if scores else [],
        "kept": True,
    }


def passed(mine: list[Hop], at: int, salt: str = "") -> list[wire.StepReady.Passed]:
    """Of these tensors; ``at``: which end of the hop the peer is."""
    told: dict[tuple[str, int], list[Hop]] = {}
    for hop in mine:
        told.setdefault((hop[1] if at else hop[0], hop[2]), []).append(hop)
    return [
        wire.StepReady.Passed(
            peer=peer,
            kind=kind,
            indices=[hop[3] for hop in of],
            parts=[hop[4] for hop in of],
            digests=b"".join(digest(hop, salt) for hop in of),
        )
        for (peer, kind), of in told.items()
    ]


def audited(audit: wire.Audit, **changes: Any) -> wire.NodeMessage:
    """The answer of an auditor with the same result, with some fields changed."""
    compared = {"addends"} if audit.HasField("bucket") else set[str]()
    for first in audit.micro_batches[:1]:
        compared |= {"activations" if first.next else "losses", *(["gradients"] if first.previous else ())}
    fields = {"number": audit.number, **{kind: 0.0 if kind in compared else -1.0 for kind in COMPARED}}
    return wire.NodeMessage(audited=wire.Audited(**{**fields, **changes}))
