"""Before a plan begins: whether all holders of a bucket hold the same state. Some trained the bucket; others got it from these
nodes, from standbys, or from a snapshot whose digests are in the log. So donors' state is checked before anybody trains on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.copies.agreed_state import by_bucket
from dtfm.coordinator.core.findings import Doubt, Setback
from dtfm.coordinator.core.givers import could_name
from dtfm.coordinator.core.phases import StateTold, Switching
from dtfm.coordinator.core.refusal import name_some
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.agreement import state_differs
from dtfm.coordinator.core.validation.votes import check_states
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.steps import SETTLED
from dtfm.protos import control_pb2 as wire


def told(state: State, phase: Switching, node: str, states: Collection[wire.BucketState]) -> Switching:
    """The phase, now that ``node`` has said which state it holds. Raises Refused."""
    ledger, plan = state.ledger, state.ledger.training.in_force
    due = [layer for stage in plan.stages if node in stage.replicas for layer in range(*stage.layers)]
    named = phase.givers.get(node, ()), state.members.sessions[node].copies_from
    layers = len(ledger.description.workload.layers)
    mine = check_states(
        states, ledger.description.buckets, lambda bucket: could_name(named, bucket, layers) - {node}, due
    )
    if node not in plan.nodes:
        mine = {bucket: said for bucket, said in mine.items() if _holds(ledger, node, bucket, said)}
    return replace(phase, states={**phase.states, node: {**phase.states.get(node, {}), **mine}})


def difference(transition: Transition, phase: Switching) -> Setback | None:
    """The nodes that hold different state than others; None: all agree, and training can begin."""
    ledger, training = transition.state.ledger, transition.state.ledger.training
    step, main = training.step, training.in_force.stages[0].island
    wrong: dict[str, tuple[int, tuple[str, ...], list[str]]] = {}  # by node: a bucket, its donors, its holders
    snapshot = () if ledger.state_is_held else ledger.copies.digests(step)
    for (island, bucket), views in sorted(_by_bucket(ledger, phase).items()):
        held = {node: said.digest for node, said in views.items() if _holds(ledger, node, bucket, said)}
        if snapshot and snapshot[bucket] and training.began.get(island) != step:
            held = {"the snapshot": snapshot[bucket]}
        if len({*held.values(), *(said.digest for said in views.values())}) == 1:
            continue
        digests = held or {node: said.digest for node, said in views.items()}
        stage = next((i for i, s in enumerate(ledger.training.in_force.stages) if bucket in range(*s.layers)), 0)
        if (found := state_differs(ledger, digests, stage, f"bucket {bucket}", went_on=bool(held))) is not None:
            return found
        right = next(iter(held.values()))
        for node, said in views.items():  # one bucket per node, if possible a bucket that it has from a single donor
            if said.digest != right and (node not in wrong or len(said.donors) == 1 < len(wrong[node][1])):
                wrong[node] = bucket, said.donors, sorted(held)
    if wrong:
        return _had_another(step, wrong)
    told = _by_bucket(ledger, phase).items()
    by_bucket(transition, {n: next(iter(views.values())).digest for (island, n), views in told if island == main})
    return None


def _had_another(step: int, wrong: Mapping[str, tuple[int, tuple[str, ...], list[str]]]) -> Setback:
    """Some nodes have other state than the nodes that trained it. They get the state again, from other donors."""
    doubts = []
    for node, (bucket, donors, holders) in sorted(wrong.items()):
        what = f"after step {step} {node} has another state of bucket {bucket} than {name_some(holders)}"
        if donors:
            doubts.append(
                Doubt(Charge.STATE, (node, *donors), f"{what}, and says it is from {name_some(donors)}", (node,))
            )
        else:
            doubts.append(Doubt(Charge.DIGEST, (node,), what))
    return Setback(SETTLED, doubts[0].nodes[0], doubts[0].reason, tuple(doubts))


def _by_bucket(ledger: Ledger, phase: Switching) -> Mapping[tuple[int, int], Mapping[str, StateTold]]:
    """By island and bucket, the reports of the nodes that train the bucket there, or have it from there."""
    found: dict[tuple[int, int], dict[str, StateTold]] = {}
    plan = ledger.training.in_force
    islands = {**ledger.training.islands, **{node: s.island for s in plan.stages for node in s.replicas}}
    for node, states in sorted(phase.states.items()):
        for bucket, said in states.items():
            found.setdefault((islands.get(node, 0), bucket), {})[node] = said
    return found


def _holds(ledger: Ledger, node: str, bucket: int, said: StateTold) -> bool:
    """Whether the node has had the bucket since before the plan. Which layers use a shared bucket is not known here."""
    holders = ledger.holders_in(ledger.source_of(node))
    if bucket < len(holders):
        return node in holders[bucket]
    return not said.donors and any(node in layer for layer in holders)
