"""Audits: part of a step's work is done again by others, after all votes and before the commit, which waits for their answers.

core/trust says which work (draw.py), how far results may be apart (tolerance.py) and whom to believe. Here audits are ordered,
asked, answered and judged; steps.py carries the conclusion out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from dtfm.coordinator.core.plan_adoption import newest_before
from dtfm.coordinator.core.state import ATTEMPTS, State, Stepping
from dtfm.coordinator.core.timeouts import audit_patience
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.audits import Audit, Passed, Request, Strike
from dtfm.coordinator.core.trust.draw import Drawn, cannot_be_audited, chance, draw
from dtfm.coordinator.core.trust.passed import added_up, read_passed
from dtfm.coordinator.core.trust.standing import party_of
from dtfm.coordinator.core.trust.tolerance import tolerance
from dtfm.coordinator.core.trust.verdict import Against, against_one, settle
from dtfm.coordinator.core.validation import malformed, name_some, shorten
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Audits, Ledger
from dtfm.protos import control_pb2 as wire
from dtfm.protos.frame import Kind
from dtfm.scheduler.model.chains import chains, micro_batches_of
from dtfm.scheduler.model.plan import Plan

MOST_REFEREES = 4
"""Further parties that are asked when one has come to something else."""

REFEREE_FRACTION = 0.5
"""Of the tolerance, from which on a referee counts as having come to something else as well. So nobody can lie by just so much
that auditors, whose devices differ, fall out over it."""

MOST_UNDONE = 1000
"""Steps by which the run may go back to undo what a liar did."""

_KINDS = ("activations", "gradients", "addends", "losses")


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The step is aborted, and goes on without those whom the verdict is against. ``back_before``: before this step, as what the
    liar did since then is to be undone; None: the run does not go back."""

    verdict: Against
    charge: Charge
    reason: str
    back_before: int | None = None


def passed_in(state: State, phase: Stepping, node: str, vote: wire.StepReady) -> Mapping[str, Passed]:
    """What those who voted until now say was passed on, where the step is one of which work may be audited. Raises Refused."""
    plan, described = state.ledger.plan, state.ledger.described
    if not state.run.trust.audits or phase.resumed:
        return {}
    assert plan is not None
    assert described is not None
    return {**phase.passed, node: read_passed(vote, plan, node, described.buckets)}


def drawn(transition: Transition, phase: Stepping, weight: Callable[[str], float] = lambda _: 1.0) -> tuple[Audit, ...]:
    """What is done again of a step for which all have voted. Nobody is asked yet: see `conclude`. ``weight``: how many times as
    often as others a node is audited."""
    state, plan = transition.state, transition.state.ledger.plan
    assert plan is not None
    if not phase.passed:
        return ()
    party = party_of(state.ledger)
    _say_what_cannot_be_audited(transition, plan, party)
    kept = {node for node, vote in phase.votes.items() if vote.kept}
    random = chance(state.secret, plan.generation, phase.step)
    found = draw(plan, state.run.trust.audits, random, party, kept, weight)
    return tuple(Audit(_order(state, phase, plan, each, random), (each.by,)) for each in found)


def heard(transition: Transition, node: str, answer: wire.Audited) -> None:
    """An auditor's answer. One that is not awaited is ignored."""
    phase, state = transition.state.phase, transition.state
    audits = phase.audits if isinstance(phase, Stepping) else ()
    asked = [audit for audit in audits if node in audit.awaited and audit.awaited[node].number == answer.number]
    if not asked:
        transition.log(f"ignored the answer of {node} to audit {answer.number}: it is not awaited")
        return
    assert isinstance(phase, Stepping)
    audit = asked[0]
    needed = _needed(audit.order)
    _check(answer, needed)
    _set_audit(transition, phase, audit, replace(audit, answers={**audit.answers, node: answer}))
    memory = state.auditing
    if (who := answer.withheld_by) != "":
        strike = Strike(phase.step, node, audit.order.node)
        withheld = {**memory.withheld, who: (*memory.withheld.get(who, ()), strike)[-2 * ATTEMPTS :]}
    else:
        of, came = audit.order.node, frozenset[str]() if answer.problem else needed
        withheld = {
            # Nobody is cleared of what audits of one node needed by what it hands out for those of others.
            each: tuple(strike for strike in strikes if each not in came or strike.of != of)
            for each, strikes in memory.withheld.items()
        }
        withheld = {each: strikes for each, strikes in withheld.items() if strikes}
    memory = replace(memory, withheld=withheld, silent={n: c for n, c in memory.silent.items() if n != node})
    transition.state = replace(transition.state, auditing=memory)


def conclude(transition: Transition) -> Conclusion | None:
    """Asks whom there is to ask, gives up whom there is no answer from, and judges what is answered. Whether audits still wait
    stands in the phase."""
    _give_up_overdue(transition)
    if (found := _obstruction(transition)) is not None:
        return found
    phase = transition.state.phase
    assert isinstance(phase, Stepping)
    for audit in phase.audits:
        if audit.answers.keys() >= set(audit.auditors):
            referees = _referees(transition.state, audit)
            if referees:
                _set_audit(transition, phase, audit, replace(audit, auditors=(*audit.auditors, *referees)))
            else:
                _set_audit(transition, phase, audit, None)
                if (found := _judged(transition, audit)) is not None:
                    return found
            phase = transition.state.phase
            assert isinstance(phase, Stepping)
    _ask(transition)
    return None


def evades(phase: Stepping, node: str) -> bool:
    """Whether work of the node is being done again, which it would escape if the step were committed because it leaves."""
    return any(audit.order.node == node for audit in phase.audits)


def _order(state: State, phase: Stepping, plan: Plan, drawn: Drawn, random: Random) -> wire.Audit:
    node, stage = drawn.node, plan.stage_of(drawn.node)
    assert stage is not None
    sent, received, vote = phase.passed[node].sent, phase.passed[node].received, phase.votes[node]
    last = stage == len(plan.stages) - 1
    losses = dict(zip(micro_batches_of(plan)[node], vote.losses, strict=True)) if last else {}
    order = wire.Audit(generation=plan.generation, step=phase.step, node=node)
    for number in drawn.micro_batches:
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
    if drawn.whole and not _adds_sparsely(state, node):
        kept = {each for each, its in phase.votes.items() if its.kept}
        _order_addends(
            order, phase.passed[node], added_up(phase.passed[node], kept) if not vote.clipped else {}, random
        )
    return order


def _order_addends(
    order: wire.Audit, passed: Passed, summed: Mapping[tuple[int, int], Mapping[str, bytes]], random: Random
) -> None:
    """Of one bucket, what it sent to be added up, and one of the pieces that it added up itself."""
    pieces = {(hop[3], hop[4]): digest for hop, digest in passed.sent.items() if hop[2] == Kind.REDUCE}
    if not (buckets := sorted({bucket for bucket, _ in (*pieces, *summed)})):
        return
    bucket = order.bucket = random.choice(buckets)
    for (index, piece), digest in sorted(pieces.items()):
        if index == bucket:
            order.pieces.add(piece=piece, digest=digest)
    if owned := sorted(piece for index, piece in summed if index == bucket):
        piece = random.choice(owned)
        addends = [wire.Audit.Addend(node=each, digest=its) for each, its in sorted(summed[bucket, piece].items())]
        order.sums.add(piece=piece, addends=addends)


def _adds_sparsely(state: State, node: str) -> bool:
    """What a node adds under a sparse codec depends on what it left out in earlier steps."""
    codecs = state.ledger.codecs.get(node, {}).values()
    return state.run.network.reduction == "topk" or any(of.get("reduction") == "topk" for of in codecs)


def _say_what_cannot_be_audited(transition: Transition, plan: Plan, party: Callable[[str], str]) -> None:
    layers = {plan.stages[index].layers for index in cannot_be_audited(plan, party)}
    memory = transition.state.auditing
    for first, past_last in sorted(layers - memory.cannot):
        transition.log(f"nobody else than one party has layers {first}-{past_last - 1}: their work cannot be audited")
    if layers != memory.cannot:
        transition.state = replace(transition.state, auditing=replace(memory, cannot=frozenset(layers)))


def _needed(order: wire.Audit) -> frozenset[str]:
    """Whose tensors the auditor may ask for."""
    around = {name for each in order.micro_batches for name in (each.previous, each.next) if name}
    return frozenset({order.node, *around, *(addend.node for summed in order.sums for addend in summed.addends)})


def _check(answer: wire.Audited, needed: Collection[str]) -> None:
    """Raises Refused."""
    for kind in _KINDS:
        error = getattr(answer, kind)
        if not (error == -1 or error >= 0):
            raise malformed(f"audited.{kind}", error, "-1, or 0 or more")
    if answer.withheld_by and answer.withheld_by not in needed:
        raise malformed(
            "audited.withheld_by",
            answer.withheld_by,
            "the node that is audited, a neighbour of its, or who sent it addends",
        )


def _ask(transition: Transition) -> None:
    """Sends the requests that are due. A node does one after the other."""
    state, phase = transition.state, transition.state.phase
    assert isinstance(phase, Stepping)
    busy = {node for audit in phase.audits for node in audit.awaited}
    until = transition.now + audit_patience(state.lease, state.ledger.step_seconds)
    for audit in phase.audits:
        for node in audit.auditors:
            if node in audit.requests or node in busy:
                continue
            busy.add(node)
            memory = transition.state.auditing
            number = memory.number + 1
            transition.state = replace(transition.state, auditing=replace(memory, number=number))
            asked = replace(audit, requests={**audit.requests, node: Request(number, until)})
            phase = _set_audit(transition, phase, audit, asked)
            audit = asked
            message = wire.Audit()
            message.CopyFrom(audit.order)
            message.number = number
            transition.send([node], wire.CoordinatorMessage(audit=message))


def _give_up_overdue(transition: Transition) -> None:
    phase = transition.state.phase
    assert isinstance(phase, Stepping)
    for audit in phase.audits:
        late = [node for node, request in audit.awaited.items() if transition.now >= request.until]
        if not late:
            continue
        phase = _set_audit(transition, phase, audit, replace(audit, answers={**audit.answers, **dict.fromkeys(late)}))
        memory = transition.state.auditing
        silent = {**memory.silent, **{node: memory.silent.get(node, 0) + 1 for node in late}}
        transition.state = replace(transition.state, auditing=replace(memory, silent=silent))
        transition.log(f"{name_some(late)} did not say in time what came of an audit of {audit.order.node}")


def _obstruction(transition: Transition) -> Conclusion | None:
    """Whether audits come to nothing because of one node, again and again. What is remembered of it is forgotten then."""
    memory = transition.state.auditing
    for node in sorted(memory.silent.keys() | memory.withheld.keys()):
        found = _of_silence(memory.silent.get(node, 0), node)
        found = found or _of_withholding(transition.state.ledger, memory.withheld.get(node, ()), node)
        if found is not None:
            silent = {each: times for each, times in memory.silent.items() if each != node}
            withheld = {each: strikes for each, strikes in memory.withheld.items() if each != node}
            memory = replace(memory, silent=silent, withheld=withheld)
            transition.state = replace(transition.state, auditing=memory)
            return found
    return None


def _of_silence(times: int, node: str) -> Conclusion | None:
    if times < ATTEMPTS:
        return None
    reason = f"it has not answered {times} audits in a row"
    return Conclusion(Against((node,), undecided=True), Charge.WITHHELD, reason)


def _of_withholding(ledger: Ledger, strikes: Sequence[Strike], node: str) -> Conclusion | None:
    """Two other parties are believed. Of one it is its word against the node's, and that counts only where the node was audited
    itself: it alone gains by withholding."""
    party = party_of(ledger)
    by = {party(strike.by): strike.by for strike in strikes if party(strike.by) != party(node)}
    if len({strike.step for strike in strikes}) < ATTEMPTS or not by:
        return None
    reason = (
        f"{ATTEMPTS} audits in a row could not be done, as it withheld what they need, said {name_some(by.values())}"
    )
    if len(by) > 1:
        verdict = Against((node,), tuple(sorted(by.values())), undecided=True)
        return Conclusion(verdict, Charge.WITHHELD, reason)
    if all(strike.of == node for strike in strikes):
        return Conclusion(against_one(ledger, (node, *by.values())), Charge.WITHHELD, reason)
    return None


def _limits(state: State, order: wire.Audit) -> Mapping[str, float]:
    """By what is to be compared, the largest relative error that is rounding's."""
    precision, codecs, plan = state.run.train.precision, state.ledger.codecs.get(order.node, {}), state.ledger.plan
    assert plan is not None

    def of(tensors: str, receivers: Collection[str]) -> float:
        return max(tolerance(precision, codecs.get(to, {}).get(tensors, "off")) for to in receivers)

    limits = {}
    if onward := {each.next for each in order.micro_batches if each.next}:
        limits["activations"] = of("activations", onward)
    else:
        limits["losses"] = tolerance(precision)
    if back := {each.previous for each in order.micro_batches if each.previous}:
        limits["gradients"] = of("gradients", back)
    if order.HasField("bucket"):
        limits["addends"] = of("reduction", [node for node in plan.nodes if node != order.node])
    return limits


def _found_right(state: State, audit: Audit, node: str) -> bool | None:
    """Whether the auditor came to the same; None: it came to nothing."""
    answer, fraction = audit.answers.get(node), 1.0 if node == audit.auditors[0] else REFEREE_FRACTION
    if answer is None or answer.problem or answer.withheld_by:
        return None
    limits = _limits(state, audit.order)
    if any(getattr(answer, kind) > fraction * limit for kind, limit in limits.items()):
        return False
    return None if any(getattr(answer, kind) < 0 for kind in limits) else True


def _referees(state: State, audit: Audit) -> list[str]:
    """Who else is to be asked, as the only one who was has come to something else: other parties that hold the stage."""
    plan, phase, party = state.ledger.plan, state.phase, party_of(state.ledger)
    assert plan is not None
    assert isinstance(phase, Stepping)
    if len(audit.auditors) > 1 or _found_right(state, audit, audit.auditors[0]) is not False:
        return []
    stage = plan.stages[plan.stage_of(audit.order.node) or 0]
    others: dict[str, str] = {}
    for node in sorted(stage.replicas, key=lambda each: (not phase.votes[each].kept, each)):
        others.setdefault(party(node), node)
    for node in (audit.order.node, *audit.auditors):
        others.pop(party(node), None)
    return list(others.values())[:MOST_REFEREES]


def _judged(transition: Transition, audit: Audit) -> Conclusion | None:
    """All have answered. What they came to goes into the log; the conclusion is about who is wrong, if anybody is."""
    state, node = transition.state, audit.order.node
    step = audit.order.step
    views = {by: right for by in audit.auditors if (right := _found_right(state, audit, by)) is not None}
    if not views:
        for by, answer in audit.answers.items():
            if answer is not None:
                why = shorten(answer.problem) or f"{answer.withheld_by} withheld something" * bool(answer.withheld_by)
                transition.log(f"{by} could not audit {node} in step {step}: {why or 'it has compared nothing'}")
        return None
    verdict = settle(state.ledger, {node: True, **views}, operator.eq)
    wrong = verdict is not None and node in verdict.members
    if agreeing := [by for by, right in views.items() if right is not wrong]:
        _log_audit(transition, audit, agreeing[0], clean=not wrong)
    if verdict is None:
        return None
    sayers = name_some(by for by, right in views.items() if not right)
    if not wrong:
        reason = f"in step {step} it said that work of {node} was wrong, which {name_some(verdict.others)} found right"
        return Conclusion(verdict, Charge.AUDIT, reason)
    reason = f"in step {step}, {sayers} did its work again and came to something else ({_said(audit, agreeing[0])})"
    if verdict.undecided:
        return Conclusion(verdict, Charge.AUDIT, reason)
    return _with_undoing(transition.state, Conclusion(verdict, Charge.AUDIT, reason), node)


def _with_undoing(state: State, found: Conclusion, node: str) -> Conclusion:
    """What the node did since its last clean audit is suspect: whether, and how far, the run goes back."""
    ledger = state.ledger
    who = ledger.key_of(node) or node
    clean = max(ledger.audits.get(who, Audits()).last, ledger.began.get(who, 0))
    if clean >= ledger.step:
        return found
    back = ledger.step - newest_before(state, clean + 1).step
    if back > MOST_UNDONE:
        reason = f"{found.reason}; what it did since step {clean} stays, as undoing it would take {back} steps"
        return replace(found, reason=reason)
    return replace(found, back_before=clean + 1)


def _log_audit(transition: Transition, audit: Audit, by: str, *, clean: bool) -> None:
    order, answer = audit.order, audit.answers[by]
    assert answer is not None
    errors = {kind: min(getattr(answer, kind), 1e9) for kind in _KINDS if getattr(answer, kind) >= 0}
    transition.emit(
        ev.WorkAudited(
            step=order.step,
            generation=order.generation,
            node=order.node,
            by=by,
            micro_batches=len(order.micro_batches),
            clean=clean,
            errors=errors,
            key=transition.state.ledger.key_of(order.node),
        )
    )


def _said(audit: Audit, by: str) -> str:
    answer = audit.answers[by]
    errors = {kind: getattr(answer, kind) for kind in _KINDS}
    return ", ".join(f"{kind} {error:.2g}" for kind, error in errors.items() if error > 0 or math.isinf(error))


def _set_audit(transition: Transition, phase: Stepping, before: Audit, after: Audit | None) -> Stepping:
    """Replaces the audit, or drops it (None). Returns the phase as it is now."""
    audits = tuple(after if each is before else each for each in phase.audits)
    phase = replace(phase, audits=tuple(each for each in audits if each is not None))
    transition.enter(phase)
    return phase
