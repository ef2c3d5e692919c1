"""Which work of a step is done again, by whom, and what an auditor is asked: the digests of what went in and came out.

The draw is a pure function of chance, which the shell keys with a secret of its process, so that nobody can foresee it. Half of
the work that is done again is whole shares: all of a node's micro-batches, and what it added to one bucket. The other half is a
few micro-batches of each node. What is done again of some nodes beyond the rate is whole shares. All this comes to all nodes at
once, and auditors work side by side: so most steps take no longer, and the others hardly more than what one node does again.
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
from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.trust.passed import added_up
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.chains import chains, micro_batches_of
from dtfm.scheduler.model.plan import Plan

LEAST_SHARE = 1 / 15
"""The least share of a node's micro-batches in an audit: then a step in eight times the rate is audited. Where this is less
than one micro-batch, one is drawn, more rarely."""

MOST_EACH = 2
"""Audits that a node does for one step, unless one party has so many names in a stage that others could not be drawn for all."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """``by`` does these micro-batches of ``node`` again. ``whole``: they are all of its share, so that what it added to a bucket
    can be compared as well."""

    node: str
    by: str
    micro_batches: tuple[int, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class Odds:
    """A node's whole share is done again with probability ``whole``, and this ``share`` of it with probability ``part``."""

    whole: float
    part: float
    share: float


def odds(rate: float, most: int, weight: float = 1.0) -> Odds:
    """For the expected share ``rate`` (0 to 1) of the work, where nodes have at most ``most`` micro-batches; times ``weight``, at
    most all. What is above the rate goes into whole shares: to be proven by a few micro-batches of each audit would say nothing
    of what a node adds to the gradients."""
    usual = rate * min(weight, 1.0)
    more = min(rate * weight, 1.0) - usual
    whole, rest = usual / 2 + more, usual / 2
    part = min(rest / max(LEAST_SHARE, 1 / max(most, 1)), 1 - whole)
    return Odds(whole, part, rest / part if part else 0.0)


def chance(secret: bytes, generation: int, step: int) -> Random:
    """``secret``: 32 bytes. Of the same arguments the same."""
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
    """What is done again of a step under ``plan``: of each node the share ``rate`` times its ``weight``, at most all, in the long
    run. ``kept``: the nodes that have what they sent. Only these audit, and only micro-batches can be done again whose neighbours
    `must_have` what they sent. An auditor is one that `can_do_again` what the node did, and of another party. In
    a step that ``exchanges``, what is done again is always whole, and needs no neighbour. ``apart``: pairs of nodes,
    each in order of name, that give each other nothing. Who reaches all of the node's neighbours audits it rather than
    others, and of these those that are ``believed``."""
    share_of = micro_batches_of(plan)
    most = max((len(mine) for mine in share_of.values()), default=0)
    by_node = {
        node: Odds(min(rate * weight(node), 1), 0, 0) if exchanges else odds(rate, most, weight(node))
        for node in plan.nodes
    }
    at = random.random()  # one for all, so that all are audited in the same steps
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
            if exchanges:  # the slow would keep all waiting
                able = [by for by in able if 2 * len(share_of[by]) >= load] or able
            beside = frozenset[str]().union(*(neighbours[node, number] for number in mine)) if apart else ()
            able = [by for by in able if not any((min(by, n), max(by, n)) in apart for n in beside)] or able
            count = min(count, len(mine))
            if at < odd.whole + odd.part and (count or exchanges) and able:
                # The next in the ring, of those who have least to do.
                by = min(able, key=lambda each: (each not in believed, busy[each]))
                busy[by] += 1
                drawn.append(Drawn(node, by, tuple(sorted(random.sample(mine, count))), count == load))
    return tuple(drawn)


def groups_of(plan: Plan, exchanges: bool) -> list[Sequence[str]]:
    """Nodes that can do each other's work again: the replicas of a stage; in a step that ``exchanges`` also all that are alone in
    their islands."""
    alone = [island.nodes[0] for island in plan.islands if exchanges and len(island.nodes) == 1]
    return [alone, *(stage.replicas for stage in plan.stages if stage.replicas[0] not in alone)]


def can_do_again(plan: Plan, node: str, exchanges: bool) -> Sequence[str]:
    """The nodes that can do again what this one did, which is among them."""
    return next(group for group in groups_of(plan, exchanges) if node in group)


def must_have(neighbours: Collection[str], node: str, party: Callable[[str], str], kept: Collection[str]) -> bool:
    """Whether these neighbours of the node have what they sent, as they say; another name of its own party must, whatever it
    says: else nobody could do again what such a party does."""
    return all(each in kept or party(each) == party(node) for each in neighbours)


def _room(replicas: Collection[str], party: Callable[[str], str]) -> int:
    """Audits that each of the replicas of a stage does for one step: enough for all names of each party, by those of others."""
    others = [len(replicas) - names for names in Counter(map(party, replicas)).values()]
    return max([MOST_EACH, *(math.ceil(len(replicas) / able) for able in others if able)])


def neighbours_of(plan: Plan) -> Mapping[tuple[str, int], frozenset[str]]:
    """By node and micro-batch of its share: from whom it comes and to whom it goes."""
    return {
        (node, number): frozenset((*chain[max(place - 1, 0) : place], *chain[place + 1 : place + 2]))
        for number, chain in enumerate(chains(plan))
        for place, node in enumerate(chain)
    }


def order_for(state: State, phase: Stepping, plan: Plan, drawn: Drawn, random: Random) -> wire.Audit:
    """With the digests that votes have. ``random`` chooses the bucket of a whole share, and the sum."""
    node, index = drawn.node, plan.stage_of(drawn.node)
    assert index is not None
    sent, received, vote = phase.passed[node].sent, phase.passed[node].received, phase.votes[node]
    stage, last = plan.place_in_island(index), plan.beside(index)[1] is None
    exchanges, debts = state.rounds.exchanges(phase.step), state.ledger.training.debts
    losses = dict(zip(micro_batches_of(plan)[node], vote.losses, strict=True)) if last and not exchanges else {}
    order = wire.Audit(generation=plan.generation, step=phase.step, node=node)
    if exchanges and node in debts.alone.values():
        of_round = state.ledger.optimizer  # in all of its steps
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
        # In an exchange all keep what they send, whatever they say.
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
    """Of one bucket, what it sent to be added up, or in an exchange of all; and one of the pieces that it added up itself."""
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
    """Whose tensors the auditor may ask for."""
    around = {each.previous for each in order.micro_batches}
    around |= {each.next for each in order.micro_batches}
    addends = {addend.node for summed in order.sums for addend in summed.addends}
    return frozenset({order.node, *around, *addends} - {""})
