"""Before training goes on under a plan, all who hold a bucket hold the same: those who had it before, who vouch for it, and those
who got it from them, from standbys or from a snapshot. So what a donor hands out is checked before anybody trains on it.

Switching -> Switching, under the next generation, or -> Gathering, where they do not.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from dtfm.coordinator.core.charging import quarantine
from dtfm.coordinator.core.plan_adoption import again, back_before, regroup
from dtfm.coordinator.core.safekeeping.agreed_state import by_bucket
from dtfm.coordinator.core.state import State, StateTold, Switching
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.givers import accusers, could_name, has_accused, has_mixed
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.verdict import Against, against_one, settle
from dtfm.coordinator.core.validation.refusal import name_some
from dtfm.coordinator.core.validation.votes import check_states
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire

CONVINCING = 2
"""So many parties that say the same of a donor are believed, if as many others hold what they should have had from it."""


@dataclass(frozen=True, slots=True)
class _Wrong:
    """``node`` has another state of ``bucket`` than its ``holders``. It says that it has it from ``donors``, who were named to
    it."""

    node: str
    bucket: int
    donors: tuple[str, ...]
    holders: tuple[str, ...]


def told(state: State, phase: Switching, node: str, states: Collection[wire.BucketState]) -> Switching:
    """The phase, once ``node`` has said what it holds. Raises Refused."""
    ledger = state.ledger
    assert ledger.described is not None
    assert ledger.training.plan is not None
    due = [layer for stage in ledger.training.plan.stages if node in stage.replicas for layer in range(*stage.layers)]
    named = phase.givers.get(node, ()), state.members.sessions[node].copies_from
    layers = len(ledger.described.workload.layers)
    mine = check_states(
        states, ledger.described.buckets, lambda bucket: could_name(named, bucket, layers) - {node}, due
    )
    if node not in ledger.training.plan.nodes:
        mine = {bucket: said for bucket, said in mine.items() if _holds(ledger, node, bucket, said)}
    return replace(phase, states={**phase.states, node: {**phase.states.get(node, {}), **mine}})


def is_agreed(transition: Transition, phase: Switching) -> bool:
    """Whether training can begin. Otherwise somebody is accused, and the plan comes again, with other donors or other nodes."""
    ledger = transition.state.ledger
    wrong: dict[str, _Wrong] = {}  # of each node one bucket, if possible one of which it says from whom alone it has it
    for bucket, views in sorted(_by_bucket(phase).items()):
        if len({said.digest for said in views.values()}) == 1:
            continue
        held = {node: said.digest for node, said in views.items() if _holds(ledger, node, bucket, said)}
        digests = held or {node: said.digest for node, said in views.items()}
        if (verdict := settle(ledger, digests, operator.eq)) is not None:
            _contradict(transition, verdict, bucket, digests, went_on=bool(held))
            return False
        right = next(iter(held.values()))
        for node, said in views.items():
            if said.digest != right and (node not in wrong or len(said.donors) == 1 < len(wrong[node].donors)):
                wrong[node] = _Wrong(node, bucket, said.donors, tuple(sorted(held)))
    if wrong:
        _get_again(transition, list(wrong.values()))
        return False
    by_bucket(transition, {bucket: next(iter(views.values())).digest for bucket, views in _by_bucket(phase).items()})
    return True


def _by_bucket(phase: Switching) -> Mapping[int, Mapping[str, StateTold]]:
    found: dict[int, dict[str, StateTold]] = {}
    for node, states in sorted(phase.states.items()):
        for bucket, said in states.items():
            found.setdefault(bucket, {})[node] = said
    return found


def _holds(ledger: Ledger, node: str, bucket: int, said: StateTold) -> bool:
    """Whether the node has had the bucket since before the plan. Which layers use one that several share is not known here."""
    holders = ledger.holders
    if bucket < len(holders):
        return node in holders[bucket]
    return not said.donors and any(node in layer for layer in holders)


def _contradict(
    transition: Transition, verdict: Against, bucket: int, digests: Mapping[str, str], *, went_on: bool
) -> None:
    """Those who have trained a bucket hold different state of it; or, unless training ``went_on`` with it, those who have read or
    made it."""
    ledger = transition.state.ledger
    assert ledger.training.plan is not None
    stage = next((i for i, stage in enumerate(ledger.training.plan.stages) if bucket in range(*stage.layers)), 0)
    transition.emit(ev.DigestMismatch(ledger.training.step + 1, ledger.training.generation, stage, dict(digests)))
    reason = f"after step {ledger.training.step} its state of bucket {bucket} differs from that of others"
    quarantine(
        transition, replace(verdict, undecided=True), Charge.DIGEST, reason
    )  # as in a step, see stepping/votes.py
    regroup(transition, f"{name_some(verdict.members)}: {reason}")
    if verdict.undecided and went_on:
        back_before(transition, ledger.training.step, reason)


def _get_again(transition: Transition, wrong: Collection[_Wrong]) -> None:
    """Nodes have got wrong state. They get it again, from other donors."""
    ledger = transition.state.ledger
    for each in wrong:
        transition.emit(
            ev.StateRefused(ledger.training.step, ledger.training.generation, each.node, each.donors, each.bucket)
        )
    accused = set[str]()
    for each in wrong:
        if accused.isdisjoint(each.donors) and (verdict := _against_donor(transition.state.ledger, each)) is not None:
            reason = f"several nodes got another state of bucket {each.bucket} from it than others hold"
            quarantine(transition, verdict, Charge.STATE, reason)
            accused.update(verdict.members)
    for each in wrong:
        if (
            accused.isdisjoint(each.donors)
            and (verdict := _between_them(ledger, transition.state.ledger, each)) is not None
        ):
            state = f"the state of bucket {each.bucket} that {each.node} has"
            reason = f"after step {ledger.training.step} {state} differs, whoever gives it"
            quarantine(transition, verdict, Charge.DIGEST, reason)
            accused.update(verdict.members)
    first = next(iter(wrong))
    reason = f"{first.node} had another state of bucket {first.bucket} than {name_some(first.holders)}"
    if accused:
        regroup(transition, reason)
    else:
        again(transition, reason)


def _against_donor(ledger: Ledger, wrong: _Wrong) -> Against | None:
    """Against the one donor, undecided, as those who accuse it may have agreed on that."""
    party = party_of(ledger)
    if len(set(map(party, wrong.donors))) != 1 or len(set(map(party, wrong.holders))) < CONVINCING:
        return None
    against = accusers(ledger, wrong.donors[0])
    return Against(wrong.donors[:1], against, undecided=True) if len(against) >= CONVINCING else None


def _between_them(before: Ledger, ledger: Ledger, wrong: _Wrong) -> Against | None:
    """Its word against that of all who could give it the state, once it has tried them all; against that of its donors, if it
    says the same again, so that nobody is tried for ever. ``before``: the ledger without what it says now."""
    party, node = party_of(ledger), wrong.node
    holders = {party(holder): holder for holder in reversed(wrong.holders) if party(holder) != party(node)}
    if not wrong.donors:
        return Against((node,), tuple(sorted(holders.values())), undecided=True)
    named = set(map(party, wrong.donors))
    if named <= has_accused(before, node) if len(named) == 1 else has_mixed(before, node):
        return replace(against_one(ledger, (node, *wrong.donors)), undecided=True)
    if holders.keys() - has_accused(ledger, node):
        return None
    if len(holders) >= CONVINCING:
        return Against((node,), tuple(sorted(holders.values())))
    return against_one(ledger, (node, *holders.values()))
