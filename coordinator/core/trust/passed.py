"""The tensors that votes name, by digest, as passed from node to node: read, bounded, and compared at both ends of each hop.

The plan decides which tensors go between stages. It does not decide how a bucket is cut into pieces. But a replica that names a
piece must name all tensors of the piece that go to its owner or come from there. So if both ends of each hop say the same, all
replicas name the same pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from functools import lru_cache
from itertools import pairwise

from dtfm.coordinator.core.audits import Hop, Passed
from dtfm.coordinator.core.refusal import malformed, require
from dtfm.coordinator.core.validation.admission import MAX_NODES
from dtfm.coordinator.log.run import Described
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.chains import REMEMBERED, chains
from dtfm.scheduler.model.plan import Plan

DIGEST_BYTES = 16

MOST_PASSED = 100_000
"""The number of tensors that a node may name in a vote, each way."""

Members = Mapping[int, tuple[str, ...]]
"""By layer, the nodes that reduce its bucket."""

PIECE_BYTES = 1 << 21
"""The least size of a piece, in bytes of parameters. All pieces of a bucket except the last one of a shard are at least this
large. A piece has this many elements (node/model/placement.py), of at least one byte."""


def read_passed(
    vote: wire.StepReady, plan: Plan, node: str, described: Described, *, exchanges: bool = False
) -> Passed:
    """The tensors that the node votes to have sent and got under this plan. ``exchanges``: the step exchanges and does not train.
    Raises Refused for tensors that the plan does not have, or that are named twice."""
    (sent, received), members = _due(plan, node, exchanges)
    return Passed(
        _read("sent", vote.sent, sent, plan, node, members, described),
        _read("received", vote.received, received, plan, node, members, described),
    )


def lacks(plan: Plan, node: str, passed: Passed, *, exchanges: bool = False) -> str:
    """A part of a sentence: a tensor that the node had to send or get, and does not name; empty: it names all. Of the pieces of a
    layer's bucket, only pieces that it names are checked. The plan does not say which nodes have a tied parameter."""
    between, members = _due(plan, node, exchanges)
    pieces = _with_named_pieces(members, range(*plan.stages[plan.stage_of(node) or 0].layers), node, passed)
    for verb, its, more, named in zip(("sent", "got"), between, pieces, (passed.sent, passed.received), strict=True):
        if missing := sorted((its | more) - named.keys()):
            sender, receiver, kind, index, _ = missing[0]
            other = receiver if sender == node else sender
            return f"{verb} {Kind(kind).name} {index}, which goes between it and {other}, among {len(missing)} tensors"
    return ""


def _with_named_pieces(members_of: Members, layers: range, node: str, passed: Passed) -> tuple[set[Hop], set[Hop]]:
    """The tensors that the node must have sent, and got, for each named piece of its layers' buckets. The piece's owner gets an
    addend from each other member, and sends them the sum. Another member sends the owner an addend, and gets the sum."""
    named = {
        (bucket, part)
        for _, _, kind, bucket, part in (*passed.sent, *passed.received)
        if kind in (Kind.REDUCE, Kind.GATHER) and bucket in layers
    }
    sent, received = set[Hop](), set[Hop]()
    for bucket, part in named:
        members = members_of[bucket]
        owner = members[part % len(members)]
        if owner != node:
            sent.add((node, owner, Kind.REDUCE, bucket, part))
            received.add((owner, node, Kind.GATHER, bucket, part))
            continue
        for other in members:
            if other != node:
                sent.add((node, other, Kind.GATHER, bucket, part))
                received.add((other, node, Kind.REDUCE, bucket, part))
    return sent, received


def differing(passed: Mapping[str, Passed]) -> list[tuple[str, str, str]]:
    """The pairs of nodes that say different digests of tensors between them: sender, receiver and an example. All nodes of the
    plan have voted."""
    sent = {hop: digest for told in passed.values() for hop, digest in told.sent.items()}
    received = {hop: digest for told in passed.values() for hop, digest in told.received.items()}
    found: dict[tuple[str, str], str] = {}
    for hop in sorted(hop for hop in sent.keys() | received.keys() if sent.get(hop) != received.get(hop)):
        sender, receiver, kind, index, part = hop
        found.setdefault((sender, receiver), f"{Kind(kind).name} {index}, part {part}")
    return [(*pair, example) for pair, example in found.items()]


def sent_several_sums(passed: Passed) -> str:
    """A part of a sentence: a piece whose sum the node did not send equally to all; empty: it sent each sum equally. An honest
    node encodes a sum once, so all receivers have the same digest."""
    sums: dict[tuple[int, int], bytes] = {}
    for (_, _, kind, bucket, piece), digest in sorted(passed.sent.items()):
        if kind == Kind.GATHER and sums.setdefault((bucket, piece), digest) != digest:
            return f"bucket {bucket}, part {piece}"
    return ""


def added_up(passed: Passed, kept: Collection[str]) -> dict[tuple[int, int], dict[str, bytes]]:
    """By bucket and piece that the node summed, the digest of each sender's addend. Leaves out pieces of which a sender has not
    ``kept`` its addend."""
    found: dict[tuple[int, int], dict[str, bytes]] = {}
    for (sender, _, kind, bucket, piece), digest in passed.received.items():
        if kind == Kind.REDUCE:
            found.setdefault((bucket, piece), {})[sender] = digest
    return {piece: addends for piece, addends in found.items() if addends.keys() <= set(kept)}


def _read(
    field: str,
    told: Sequence[wire.StepReady.Passed],
    between: Collection[Hop],
    plan: Plan,
    node: str,
    members: Members,
    described: Described,
) -> Mapping[Hop, bytes]:
    """The tensors in one field of a vote. ``between``: the tensors that the plan sends between stages."""
    number = sum(len(each.indices) for each in told)
    few = number <= MOST_PASSED and len(told) <= 5 * len(plan.nodes)
    require(few, field, number, f"at most {MOST_PASSED} tensors, and an entry for each peer and kind")
    nodes = frozenset(plan.nodes)
    read: dict[Hop, bytes] = {}
    for each in told:
        digests, count = len(each.digests), len(each.indices)
        whole = len(each.parts) == count and digests == DIGEST_BYTES * count
        require(whole, f"{field}.digests", digests, f"{DIGEST_BYTES} bytes for each index and part")
        require(each.peer != node and each.peer in nodes, f"{field}.peer", each.peer, "another node of the plan")
        ends = (node, each.peer) if field == "sent" else (each.peer, node)
        for place, (index, part) in enumerate(zip(each.indices, each.parts, strict=True)):
            hop = (*ends, each.kind, index, part)
            if hop in read or not (hop in between or _is_piece(hop, members, described)):
                raise malformed(field, hop, "tensors that the plan has, each once")
            read[hop] = each.digests[DIGEST_BYTES * place : DIGEST_BYTES * (place + 1)]
    return read


def _is_piece(hop: Hop, members: Members, described: Described) -> bool:
    """Whether the hop may be a piece of a bucket: member i % members sums piece i. A bucket whose number is no layer's belongs
    to a parameter that is tied between layers."""
    sender, receiver, kind, index, part = hop
    layers = described.workload.layers
    if kind not in (Kind.REDUCE, Kind.GATHER) or index >= described.buckets:
        return False
    size = layers[index].parameter_bytes if index < len(layers) else max(layer.parameter_bytes for layer in layers)
    of = members.get(index)
    if part > size / PIECE_BYTES + 2 * (len(of) if of else MAX_NODES):
        return False
    return of is None or (
        sender in of and receiver in of and of[part % len(of)] == (receiver if kind == Kind.REDUCE else sender)
    )


def _due(plan: Plan, node: str, exchanges: bool) -> tuple[tuple[Set[Hop], Set[Hop]], Members]:
    """The tensors that the plan has the node send and get between stages, and the nodes that reduce with it."""
    if exchanges:
        return (frozenset(), frozenset()), _members(plan, None)
    return _between_stages(plan)[node], _members(plan, plan.island_of(node))


@lru_cache(4 * REMEMBERED)
def _members(plan: Plan, island: int | None) -> Members:
    """By layer, its replicas in this island; None: in all islands."""
    found: dict[int, tuple[str, ...]] = {}
    for stage in plan.stages:
        for layer in range(*stage.layers) if island in (None, stage.island) else ():
            found[layer] = (*found.get(layer, ()), *stage.replicas)
    return found


@lru_cache(REMEMBERED)
def _between_stages(plan: Plan) -> Mapping[str, tuple[Set[Hop], Set[Hop]]]:
    """By node, the tensors that the plan has it send between stages in a step, and the tensors that it gets."""
    due: dict[str, tuple[set[Hop], set[Hop]]] = {node: (set(), set()) for node in plan.nodes}
    for number, chain in enumerate(chains(plan)):
        for before, after in pairwise(chain):
            for hop in ((before, after, Kind.ACTIVATION, number, 0), (after, before, Kind.GRADIENT, number, 0)):
                due[hop[0]][0].add(hop)
                due[hop[1]][1].add(hop)
    return due
