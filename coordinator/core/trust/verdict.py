"""What follows from all suspicions together: who is quarantined, who are kept apart, or that the run itself is at fault.

A suspicion names the nodes one of which is at fault (log/trust.py). Every room makes them, and this rule alone reads them:

1. *One party alone.* Whom the coordinator has seen fail, or who says so of itself, in ATTEMPTS attempts, is quarantined. Among
   people who know each other the run is at fault instead, if others fail in the same way, or if a loss is not finite and the
   others are too few for the run.
2. *One of several, as the coordinator has seen it.* The party that was among the suspects in most attempts, ATTEMPTS at least, is
   quarantined. If there are two such, their link counts as broken; if more, the one of least standing goes.
3. *One against another.* Either may be at fault. The pair is kept apart as long as the suspicion lasts (disputes.py). A node that
   several contradict is quarantined: LEAST_VOICES of them, more than half of those that it has to do with, each of standing at
   least its own, and none of them contradicted by as many. Parties that come from one address have one voice. So newcomers cannot
   throw out whom they name, and a liar who goes on runs out of others to lie to. A believed node is enough by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtfm.coordinator.core.phases import Pausing, Stepping
from dtfm.coordinator.core.state import ATTEMPTS, State
from dtfm.coordinator.core.trust.disputes import (
    against,
    attempts_of,
    between_two,
    disputes,
    kept_apart,
    standing_against,
)
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.reach import Pair, pair_of
from dtfm.coordinator.log.standing import Standing, standing_of
from dtfm.coordinator.log.trust import Suspicion

LEAST_VOICES = 3
"""The number of parties that must contradict a node, among strangers: two that agree may be one."""

LEAST_VOICES_AMONG_FRIENDS = 2

MOST_LOSSES = 2 * ATTEMPTS - 1
"""The number of attempts in a row that may fail as nodes lose each other, whoever they are."""

_NOT_PROVEN = (Charge.NON_FINITE, Charge.SILENT, Charge.WITHHELD)
"""What may have come from elsewhere, though one party alone is suspected of it."""

_DECIDED = (Charge.AUDIT, Charge.SNAPSHOT)
"""What cannot have come from elsewhere, where several contradict a node: they have all computed it by themselves."""


@dataclass(frozen=True, slots=True)
class Guilty:
    """``node`` is to be quarantined. ``undecided``: it may not be at fault; it was its word against that of the ``against``, or
    what it suffers from may have come from elsewhere."""

    node: str
    charge: Charge
    reason: str
    against: tuple[str, ...] = ()
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is ``guilty``, which pairs have come into dispute and are kept ``apart`` from now on, and whose links are to count as
    ``broken`` until they are measured again, for this ``reason``. ``run``: why the run itself is at fault; empty: it is not.
    ``charge``: for what, then."""

    guilty: tuple[Guilty, ...] = ()
    apart: tuple[Pair, ...] = ()
    broken: tuple[Pair, ...] = ()
    reason: str = ""
    run: str = ""
    charge: Charge | None = None


def verdict(state: State) -> Verdict:
    """What follows, once the newest suspicion is in the ledger."""
    ledger = state.ledger
    if not ledger.trust.suspicions:
        return Verdict()
    newest = ledger.trust.suspicions[-1]
    found = _alone(ledger)
    if isinstance(found, Verdict):
        return found
    guilty = [*found, *_contradicted(state)]
    said = between_two(ledger, but=(Charge.PEER_LOST,))
    fresh = {pair_of(*each.nodes) for each in said if each.attempt == newest.attempt}
    before, now = disputes(ledger, but=newest.attempt), disputes(ledger)
    planner = state.planner  # its plan may be on its way
    answered = (
        planner.answer.question.disputes if planner.answer and not (planner.asked or planner.chosen) else set[Pair]()
    )
    no_plan_helps = before & answered | standing_against(
        [each for each in said if each.said.charge is Charge.PLAN_FAILED]
    )
    for pair in sorted(fresh & no_plan_helps & standing_against(said)):
        if not {each.node for each in guilty}.intersection(pair):
            guilty.append(_weaker(state, pair, newest))
    broken = _lost_too_often(ledger)
    match _most_seen(ledger) if not guilty else ():
        case (one,):
            reason = f"{ATTEMPTS} attempts waited for it; the last: {newest.said.reason}"
            guilty.append(Guilty(one, newest.said.charge, reason, undecided=len(newest.nodes) > 1))
        case (one, other) if (
            isinstance(state.phase, Stepping | Pausing)
            and {one, other} <= ledger.members.keys()
            and may_lose(ledger, one, other)
        ):
            broken.add(pair_of(one, other))
        case (_, _, *_) as several:
            guilty.append(_weaker(state, several, newest))
    gone = {ledger.party(each.node) for each in guilty}

    def staying(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
        return tuple(sorted(pair for pair in pairs if gone.isdisjoint(map(ledger.party, pair))))

    return Verdict(tuple(guilty), staying(now - before), staying(broken), newest.said.reason)


def unseparable(state: State) -> Guilty | None:
    """Where no plan is possible without pairs that are in dispute: the one of less standing of the newest such pair; None: there
    is none."""
    ledger = state.ledger
    apart, ready = disputes(ledger), {*ledger.ready}
    for each in reversed(ledger.trust.suspicions):
        if len(each.nodes) == 2 and pair_of(*each.nodes) in apart and {*each.nodes} <= ready:
            return _weaker(state, each.nodes, each)
    return None


def may_lose(ledger: Ledger, node: str, peer: str) -> bool:
    """Whether the two `exchange` tensors, and the two are not kept apart already."""
    return pair_of(node, peer) not in kept_apart(ledger) and exchange(ledger, node, peer)


def exchange(ledger: Ledger, node: str, peer: str) -> bool:
    """Whether tensors pass between the two: both are in the plan, in the same stage or in neighbouring ones, or in any two
    where parameters are tied between layers or there are several islands."""
    plan, described = ledger.training.in_force, ledger.description
    one, other = plan.stage_of(node), plan.stage_of(peer)
    if one is None or other is None or node == peer:
        return False
    near = abs(one - other) <= 1 or len(plan.islands) > 1
    return near or described.buckets > len(described.workload.layers)


def attempts_since_commit(ledger: Ledger, charge: Charge) -> int:
    """The number of attempts since the last commit in which somebody was suspected of this."""
    commits, suspicions = ledger.trust.commits, ledger.trust.suspicions
    return _attempts(each for each in suspicions if each.said.charge is charge and each.commits == commits)


def _alone(ledger: Ledger) -> list[Guilty] | Verdict:
    """Those whom nobody else can have made fail; or that the run is at fault."""
    of: dict[str, list[Suspicion]] = {}
    for each in ledger.trust.suspicions:
        parties = {ledger.party(node) for node in each.nodes}
        if len(parties) == 1 and each.said.charge is not Charge.PEER_LOST:
            of.setdefault(parties.pop(), []).append(each)
    newest = ledger.trust.suspicions[-1].said
    if not ledger.is_open and newest.by == newest.nodes:
        now = (newest.charge, ledger.trust.commits)
        alike = [[each for each in its if (each.said.charge, each.commits) == now] for its in of.values()]
        several = [its for its in alike if _attempts(its) >= ATTEMPTS - 1]
        times = _attempts(each for its in alike for each in its)
        if len(several) > 1 or (ledger.is_alone and times >= ATTEMPTS):
            return Verdict(run=f"{times} attempts in a row failed; the last: {newest.reason}", charge=newest.charge)
    guilty = []
    for who, said in of.items():
        charge, attempts = said[-1].said.charge, _attempts(said)
        if attempts < ATTEMPTS:
            continue
        others = {ledger.party(node) for node in ledger.ready} - {who}
        is_needed = not others or (charge is Charge.NON_FINITE and _is_needed(ledger, who))
        if not ledger.is_open and is_needed:
            return Verdict(run=f"{attempts} attempts in a row failed; the last: {said[-1].said.reason}", charge=charge)
        reason = f"{attempts} attempts failed because of it alone; the last: {said[-1].said.reason}"
        guilty.append(Guilty(said[-1].nodes[-1], charge, reason, undecided=charge in _NOT_PROVEN))
    return guilty


def _is_needed(ledger: Ledger, who: str) -> bool:
    """Whether the other parties have fewer nodes than the run file wants stages."""
    wanted = ledger.run.get("cluster", {}).get("stages", "auto")
    stages = len(wanted) if isinstance(wanted, list) else 1 if wanted == "auto" else int(wanted)
    return sum(ledger.party(node) != who for node in ledger.ready) < stages


def _contradicted(state: State) -> list[Guilty]:
    """Those whom several others contradict, or one that is believed."""
    ledger, opponents, newest = state.ledger, against(state.ledger), dict[str, Suspicion]()
    for each in between_two(ledger, but=(Charge.PEER_LOST,)):
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
    """The other parties in its stage, and those with whom it exchanges micro-batches."""
    plan = ledger.training.plan
    if plan is None or (stage := plan.stage_of(node)) is None:
        return frozenset()
    ends = {(flow.sender, flow.receiver) for flows in plan.flows for flow in flows}
    beside = {each for pair in ends if node in pair for each in pair}
    return frozenset(map(ledger.party, {*plan.stages[stage].replicas, *beside})) - {ledger.party(node)}


def _lost_too_often(ledger: Ledger) -> set[Pair]:
    """The pairs that have lost each other in ATTEMPTS attempts; after MOST_LOSSES attempts all that have. So no member holds up a
    step for longer than that, whomever it names."""
    said = [each for each in ledger.trust.suspicions if each.said.charge is Charge.PEER_LOST and len(each.nodes) == 2]
    lost = [each for each in said if {*each.nodes} <= ledger.members.keys()]  # also two names of one party
    least = 1 if _attempts(lost) >= MOST_LOSSES else ATTEMPTS
    return {pair for pair, attempts in attempts_of(lost).items() if attempts >= least} - ledger.reach.broken


def _most_seen(ledger: Ledger) -> tuple[str, ...]:
    """Of the parties that the coordinator has seen among the suspects of the newest attempt, a name of each that was suspected
    most often, in ATTEMPTS attempts at least."""
    seen = [each for each in ledger.trust.suspicions if not each.said.by]
    if not seen or seen[-1] is not ledger.trust.suspicions[-1]:
        return ()
    attempts: dict[str, set[tuple[int, int]]] = {}
    for each in seen:
        for node in each.nodes:
            attempts.setdefault(ledger.party(node), set()).add(each.attempt)
    last = {ledger.party(node): node for node in seen[-1].nodes}
    most = max(len(attempts[who]) for who in last)
    return tuple(sorted(name for who, name in last.items() if len(attempts[who]) == most >= ATTEMPTS))


def _weaker(state: State, names: Sequence[str], said: Suspicion) -> Guilty:
    """One of them is at fault: the one that several contradict, if there is one such, or else the one that has earned least."""
    ledger, opponents = state.ledger, against(state.ledger)
    heard = {name: _heard(state, name, opponents.get(ledger.party(name), {})) for name in names}
    accused = weakest(ledger, [name for name in names if _is_outnumbered(ledger, name, heard[name])] or names)
    others = tuple(sorted(name for name in names if ledger.party(name) != ledger.party(accused)))
    return Guilty(accused, said.said.charge, said.said.reason, others, undecided=True)


def weakest(ledger: Ledger, names: Iterable[str]) -> str:
    """The one whose party has the least standing (log/standing.py), then took part in the fewest committed steps, then came
    last."""
    steps: dict[str, int] = {}  # by party, in the order in which they came
    for node, worked in ledger.trust.worked.items():
        who = ledger.party(node)
        steps[who] = max(worked, steps.get(who, 0))
    came = [*steps]

    def standing(name: str) -> tuple[int, int, int]:
        who = ledger.party(name)
        return standing_of(ledger, name), steps.get(who, 0), -came.index(who) if who in steps else -len(came)

    return min(sorted(names), key=standing)


def _attempts(said: Iterable[Suspicion]) -> int:
    return len({each.attempt for each in said})
