"""Draws the work of a step that is repeated, and its auditors. Tells an auditor the digests of the inputs and outputs.

The draw is a pure function of chance. The shell keys it with a secret of its process, so that nobody can foresee the draw. Half
of the repeated work is whole shares: all of a node's micro-batches, and its addend to one bucket. The other half is a few
micro-batches of each node. Work above the rate is drawn as whole shares. All nodes are audited in the same steps, and auditors
work side by side. So most steps take no longer, and the others take hardly longer than one node's repeated work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from blake3 import blake3

from dtfm.coordinator.core.audits import Passed
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.trust.passed import added_up
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.chains import chains, micro_batches_of
from dtfm.scheduler.model.plan import Plan

LEAST_SHARE = 1 / 15
"""The least share of a node's micro-batches in an audit. With it, the fraction of audited steps is eight times the rate. If it is
less than one micro-batch, one is drawn, less often."""

MOST_EACH = 2
"""A node's most audits in one step. There may be more if a party has so many names in a stage that few others can audit them."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """``by`` repeats these micro-batches of ``node``. ``whole``: they are the whole share of the node, so that its addend to a
    bucket can be compared as well."""

    node: str
    by: str
    micro_batches: tuple[int, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class Odds:
    """The probability that a node's ``whole`` share is repeated, and the probability that this ``share`` of it is (``part``)."""

    whole: float
    part: float
    share: float


def odds(rate: float, most: int, weight: float = 1.0) -> Odds:
    """The odds that make the expected share ``rate`` times ``weight`` (at most 1) of the work repeated. ``most``: the largest
    number of micro-batches of a node. Work above the rate is drawn as whole shares: a few micro-batches of each audit would prove
    nothing about a node's addends to gradients."""
    usual = rate * min(weight, 1.0)
    more = min(rate * weight, 1.0) - usual
    whole, rest = usual / 2 + more, usual / 2
    part = min(rest / max(LEAST_SHARE, 1 / max(most, 1)), 1 - whole)
    return Odds(whole, part, rest / part if part else 0.0)


def chance(secret: bytes, generation: int, step: int) -> Random:
    """The random numbers of a step's draw: the same for the same arguments. ``secret``: 32 bytes."""
    said = generation.to_bytes(8, "big") + step.to_bytes(8, "big")
    return Random(blake3(said, key=secret).digest())


def draw(
    plan: Plan,
    rate: float,
    random: Random,
    party: Callable[[str], str],
    kept: Collection[str],
    weight: Callable[[str], float] = lambda _: 1.0,
    *,
    exchanges: bool = False,
    apart: Collection[tuple[str, str]] = (),
    believed: Collection[str] = (),
) -> tuple[Drawn, ...]:
    """Draws the work of a step under ``plan`` that is repeated. In the long run that is, for each node, the share ``rate`` times
    its ``weight``, at most all.

    An auditor is of another party, `can_do_again` the node's work, and is in ``kept``: the nodes that have kept the tensors they
    sent. A micro-batch can be repeated only if its neighbours `must_have` the tensors they sent. In a step that ``exchanges``,
    the whole share is repeated, and no neighbour is needed. ``apart``: pairs of nodes, each in order of name, that give each
    other nothing. Prefers auditors that reach all of the node's neighbours, and among these ``believed`` nodes."""
    share_of = micro_batches_of(plan)
    most = max((len(mine) for mine in share_of.values()), default=0)
    by_node = {
        node: Odds(min(rate * weight(node), 1), 0, 0) if exchanges else odds(rate, most, weight(node))
        for node in plan.nodes
    }
    at = random.random()  # the same for all nodes, so that all are audited in the same steps
    if all(at >= odd.whole + odd.part for odd in by_node.values()):
        return ()
    neighbours, has = neighbours_of(plan), frozenset(kept)
    busy: Counter[str] = Counter()
    drawn = []
    for group in groups_of(plan, exchanges):
        ring, room = list(group), _room(group, party)
        random.shuffle(ring)
        for place, node in enumerate(ring):
            odd, load, mine = (
                by_node[node],
                len(share_of[node]),
                [n for n in share_of[node] if exchanges or must_have(neighbours[node, n], node, party, has)],
            )
            count = load if at < odd.whole else math.floor(odd.share * load + random.random())
            able = [by for by in (*ring[place + 1 :], *ring[:place]) if by in has and party(by) != party(node)]
            able = [by for by in able if busy[by] < room]
            if exchanges:  # slow auditors would keep all nodes waiting
                able = [by for by in able if 2 * len(share_of[by]) >= load] or able
            beside = frozenset[str]().union(*(neighbours[node, number] for number in mine)) if apart else ()
            able = [by for by in able if not any((min(by, n), max(by, n)) in apart for n in beside)] or able
            count = min(count, len(mine))
            if at < odd.whole + odd.part and (count or exchanges) and able:
                # The next node in the ring with the least to do.
                by = min(able, key=lambda each: (each not in believed, busy[each]))
                busy[by] += 1
                drawn.append(Drawn(node, by, tuple(sorted(random.sample(mine, count))), count == load))
    return tuple(drawn)


def groups_of(plan: Plan, exchanges: bool) -> list[Sequence[str]]:
    """Groups of nodes that can repeat each other's work: the replicas of a stage. In a step that ``exchanges``, nodes that are
    alone in their islands form one group, too."""
    alone = [island.nodes[0] for island in plan.islands if exchanges and len(island.nodes) == 1]
    return [alone, *(stage.replicas for stage in plan.stages if stage.replicas[0] not in alone)]


def can_do_again(plan: Plan, node: str, exchanges: bool) -> Sequence[str]:
    """The nodes that can repeat this node's work. The node itself is among them."""
    return next(group for group in groups_of(plan, exchanges) if node in group)


def must_have(neighbours: Collection[str], node: str, party: Callable[[str], str], kept: Collection[str]) -> bool:
    """Whether these neighbours of the node say that they have the tensors they sent. Names of the node's own party count as if
    they did: otherwise such a party could keep its work from being repeated."""
    return all(each in kept or party(each) == party(node) for each in neighbours)


def _room(replicas: Collection[str], party: Callable[[str], str]) -> int:
    """A replica's most audits in one step: enough that other parties can audit all names of each party in the stage."""
    others = [len(replicas) - names for names in Counter(map(party, replicas)).values()]
    return max([MOST_EACH, *(math.ceil(len(replicas) / able) for able in others if able)])


def neighbours_of(plan: Plan) -> Mapping[tuple[str, int], frozenset[str]]:
    """By node and micro-batch of its share: the nodes before and after it in the micro-batch's chain."""
    return {
        (node, number): frozenset((*chain[max(place - 1, 0) : place], *chain[place + 1 : place + 2]))
        for number, chain in enumerate(chains(plan))
        for place, node in enumerate(chain)
    }


def order_for(state: State, phase: Stepping, plan: Plan, drawn: Drawn, random: Random) -> wire.Audit:
    """The order for an auditor, with the digests from votes. ``random`` chooses the bucket of a whole share, and the sum."""
    node, index = drawn.node, plan.stage_of(drawn.node)
    assert index is not None
    sent, received, vote = phase.passed[node].sent, phase.passed[node].received, phase.votes[node]
    stage, last = plan.place_in_island(index), plan.beside(index)[1] is None
    exchanges, debts = state.rounds.exchanges(phase.step), state.ledger.training.debts
    losses = dict(zip(micro_batches_of(plan)[node], vote.losses, strict=True)) if last and not exchanges else {}
    order = wire.Audit(generation=plan.generation, step=phase.step, node=node)
    if exchanges and node in debts.alone.values():
        of_round = state.ledger.optimizer  # the same in all steps of the round
        for rate, ranges in zip(debts.rates, debts.of_round[plan.stages[index].island], strict=True):
            order.trained.add(
                learning_rate=rate,
                borders=[border for each in ranges for border in each],
                clip_norm=of_round.clip_norm,
                weight_decay=of_round.weight_decay,
            )
    for number in () if exchanges else drawn.micro_batches:
        chain = chains(plan)[number]
        previous, after = chain[stage - 1] if stage else "", "" if last else chain[stage + 1]
        order.micro_batches.add(
            number=number,
            previous=previous,
            next=after,
            activation_in=received.get((previous, node, Kind.ACTIVATION, number, 0), b""),
            activation_out=sent.get((node, after, Kind.ACTIVATION, number, 0), b""),
            gradient_in=received.get((after, node, Kind.GRADIENT, number, 0), b""),
            gradient_out=sent.get((node, previous, Kind.GRADIENT, number, 0), b""),
            loss=losses.get(number, 0.0),
        )
    if drawn.whole:
        party = state.ledger.party
        # In an exchange all nodes keep the tensors they send, whatever they say.
        kept = {each for each, its in phase.votes.items() if its.kept or exchanges or party(each) == party(node)}
        summed = added_up(phase.passed[node], kept) if not vote.clipped else {}
        _order_addends(order, phase.passed[node], summed, random)
    return order


def _order_addends(
    order: wire.Audit,
    passed: Passed,
    summed: Mapping[tuple[int, int], Mapping[str, bytes]],
    random: Random,
) -> None:
    """Adds to the order the node's addends to one bucket (in an exchange, to all), and one of the pieces that it summed
    itself."""
    pieces = {(hop[3], hop[4]): digest for hop, digest in passed.sent.items() if hop[2] == Kind.REDUCE}
    if not (buckets := sorted({bucket for bucket, _ in (*pieces, *summed)})):
        return
    bucket = order.bucket = random.choice(buckets)
    for (index, piece), digest in sorted(pieces.items()):
        if index == bucket or not order.micro_batches:
            order.pieces.add(piece=piece, digest=digest, bucket=index)
    if owned := sorted(piece for index, piece in summed if index == bucket):
        piece = random.choice(owned)
        addends = [wire.Audit.Addend(node=each, digest=its) for each, its in sorted(summed[bucket, piece].items())]
        order.sums.add(piece=piece, addends=addends)


def needed(order: wire.Audit) -> frozenset[str]:
    """The nodes that may be asked by the auditor for tensors."""
    around = {each.previous for each in order.micro_batches}
    around |= {each.next for each in order.micro_batches}
    addends = {addend.node for summed in order.sums for addend in summed.addends}
    return frozenset({order.node, *around, *addends} - {""})
