"""The verdict from all suspicions together: the nodes to quarantine, and the pairs to keep apart.

A suspicion names several nodes; one of them has done wrong work (log/trust.py). A node that is slow, silent or unreachable is not
suspected: that is health (core/health). Every room makes suspicions, and only this rule reads them:

1. *One party alone.* A party is quarantined if it alone is suspected in ATTEMPTS attempts, since nobody else can be at fault.
2. *One against another.* Either may be at fault. The pair is kept apart as long as the suspicion lasts (disputes.py). A node is
   quarantined if at least LEAST_VOICES others contradict it, and they are more than half of the parties that it works with. Only
   voices of at least its own standing count, and none of them may be contradicted by as many. Parties from one address have one
   voice. So newcomers cannot throw out a node just by accusing it, and a persistent liar runs out of others to lie to. A single
   believed node is enough by itself.
3. *Two that no plan keeps apart.* The node that more voices contradict goes. If the voices do not decide, the node of less
   standing goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtfm.coordinator.core.state.state import ATTEMPTS, State
from dtfm.coordinator.core.trust.disputes import against, between_two, disputes, standing_against
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import Pair, pair_of
from dtfm.coordinator.log.standing import Standing, standing_of
from dtfm.coordinator.log.trust import Suspicion

LEAST_VOICES = 3
"""The number of parties that must contradict a node, among strangers: two that agree may be one person."""

LEAST_VOICES_AMONG_FRIENDS = 2

_DECIDED = (Charge.AUDIT, Charge.SNAPSHOT)
"""Charges that no third party can have caused: each of several that contradict the node has computed the result by itself."""


@dataclass(frozen=True, slots=True)
class Guilty:
    """``node`` is to be quarantined. ``undecided``: it may be innocent, as it was its word against the word of ``against``."""

    node: str
    charge: Charge
    reason: str
    against: tuple[str, ...] = ()
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ``guilty`` nodes, and the pairs that have come into dispute and are kept ``apart`` from now on."""

    guilty: tuple[Guilty, ...] = ()
    apart: tuple[Pair, ...] = ()


def verdict(state: State) -> Verdict:
    """The verdict when the newest suspicion is in the ledger."""
    ledger = state.ledger
    if not ledger.trust.suspicions:
        return Verdict()
    newest = ledger.trust.suspicions[-1]
    guilty = [*_alone(ledger), *_contradicted(state)]
    said = between_two(ledger)
    fresh = {pair_of(*each.nodes) for each in said if each.attempt == newest.attempt}
    before, now = disputes(ledger, but=newest.attempt), disputes(ledger)
    planner = state.planner  # its plan may be on its way
    known = (
        planner.answer.question.disputes if planner.answer and not (planner.asked or planner.chosen) else set[Pair]()
    )
    for pair in sorted(fresh & before & known & standing_against(said)):
        if not {each.node for each in guilty}.intersection(pair):
            guilty.append(_weaker(state, pair, newest))
    gone = {ledger.party(each.node) for each in guilty}
    apart = (pair for pair in now - before if gone.isdisjoint(map(ledger.party, pair)))
    return Verdict(tuple(guilty), tuple(sorted(apart)))


def unseparable(state: State) -> Guilty | None:
    """If no plan is possible without disputed pairs: the node of less standing in the newest such pair. None: there are no such
    pairs."""
    ledger = state.ledger
    apart, ready = disputes(ledger), {*ledger.ready}
    for each in reversed(ledger.trust.suspicions):
        if len(each.nodes) == 2 and pair_of(*each.nodes) in apart and {*each.nodes} <= ready:
            return _weaker(state, each.nodes, each)
    return None


def _alone(ledger: Ledger) -> list[Guilty]:
    """Nodes of parties that alone are suspected in ATTEMPTS attempts."""
    of: dict[str, list[Suspicion]] = {}
    for each in ledger.trust.suspicions:
        parties = {ledger.party(node) for node in each.nodes}
        if len(parties) == 1:
            of.setdefault(parties.pop(), []).append(each)
    return [
        Guilty(
            said[-1].nodes[-1],
            said[-1].said.charge,
            f"{many} attempts failed because of it alone; {said[-1].said.reason}",
        )
        for said in of.values()
        if (many := len({each.attempt for each in said})) >= ATTEMPTS
    ]


def _contradicted(state: State) -> list[Guilty]:
    """Nodes that several others contradict, or a believed node."""
    ledger, opponents, newest = state.ledger, against(state.ledger), dict[str, Suspicion]()
    for each in between_two(ledger):
        newest.update((ledger.party(node), each) for node in each.nodes)
    names = {ledger.party(name): name for each in newest.values() for name in each.nodes}
    heard = {who: _heard(state, names[who], others) for who, others in opponents.items()}
    guilty = []
    for who, others in opponents.items():
        name, said = names[who], newest[who].said
        by = tuple(sorted(others.values()))
        believed = any(standing_of(ledger, other) is Standing.BELIEVED for other in by)
        if believed and said.charge.is_contradiction and standing_of(ledger, name) is not Standing.BELIEVED:
            reason = f"{name} and a believed node contradict each other: {said.reason}"
            guilty.append(Guilty(name, said.charge, reason, by))
        elif _is_outnumbered(ledger, name, heard[who]) and all(len(heard[who]) > len(heard[other]) for other in others):
            reason = f"{len(heard[who])} other parties contradict it; the last: {said.reason}"
            guilty.append(Guilty(name, said.charge, reason, by, undecided=said.charge not in _DECIDED))
    return guilty


def _heard(state: State, node: str, others: Mapping[str, str]) -> frozenset[str]:
    """The voices of those ``others`` whose standing is at least the node's."""
    least = standing_of(state.ledger, node)
    return frozenset(_voice(state, each) for each in others.values() if standing_of(state.ledger, each) >= least)


def _is_outnumbered(ledger: Ledger, node: str, voices: frozenset[str]) -> bool:
    least = LEAST_VOICES if ledger.is_open else LEAST_VOICES_AMONG_FRIENDS
    return len(voices) >= least and 2 * len(voices) > len(_neighbours(ledger, node))


def _voice(state: State, node: str) -> str:
    session = state.members.sessions.get(node)
    return session.origin if session is not None and session.origin else state.ledger.party(node)


def _neighbours(ledger: Ledger, node: str) -> frozenset[str]:
    """The other parties in the node's stage, and the parties that it exchanges micro-batches with."""
    plan = ledger.training.plan
    if plan is None or (stage := plan.stage_of(node)) is None:
        return frozenset()
    ends = {(flow.sender, flow.receiver) for flows in plan.flows for flow in flows}
    beside = {each for pair in ends if node in pair for each in pair}
    return frozenset(map(ledger.party, {*plan.stages[stage].replicas, *beside})) - {ledger.party(node)}


def _weaker(state: State, names: Sequence[str], said: Suspicion) -> Guilty:
    """The node of ``names`` that is held at fault: the one that several contradict. Otherwise, the one that has earned least."""
    ledger, opponents = state.ledger, against(state.ledger)
    heard = {name: _heard(state, name, opponents.get(ledger.party(name), {})) for name in names}
    accused = weakest(ledger, [name for name in names if _is_outnumbered(ledger, name, heard[name])] or names)
    others = tuple(sorted(name for name in names if ledger.party(name) != ledger.party(accused)))
    return Guilty(accused, said.said.charge, said.said.reason, others, undecided=True)


def weakest(ledger: Ledger, names: Iterable[str]) -> str:
    """The name whose party has the least standing (log/standing.py). If several have: the party that took part in the fewest
    committed steps, then the party that came last."""
    steps: dict[str, int] = {}  # by party, in order of joining
    for node, worked in ledger.trust.worked.items():
        who = ledger.party(node)
        steps[who] = max(worked, steps.get(who, 0))
    came = [*steps]

    def standing(name: str) -> tuple[int, int, int]:
        who = ledger.party(name)
        return standing_of(ledger, name), steps.get(who, 0), -came.index(who) if who in steps else -len(came)

    return min(sorted(names), key=standing)
