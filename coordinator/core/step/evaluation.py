"""The held-out loss after a commit. Among strangers each held-out micro-batch is evaluated twice, along chains that end at
different nodes (held_out_chains), and the two losses are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dtfm.coordinator.config.codecs import allowed_codecs
from dtfm.coordinator.core.findings import contradicting
from dtfm.coordinator.core.refusal import is_finite, require
from dtfm.coordinator.core.state.state import Evaluation, State
from dtfm.coordinator.core.step import spikes
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.trust.tolerance import tolerance
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.reach import Pair, pair_of
from dtfm.coordinator.log.wording import name_first
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.chains import held_out_chains
from dtfm.scheduler.model.plan import Plan


def expect(transition: Transition, step: int, plan: Plan) -> None:
    """Waits for the held-out loss. The last node of each held-out micro-batch's chain reports its part before its next vote."""
    lost(transition, f"it was not done when the evaluation after step {step} began")
    held_out = held_out_chains(plan, _held_out(transition.state), twice=transition.state.ledger.is_open)
    transition.state = replace(transition.state, evaluation=Evaluation(step, plan.generation, held_out))


def reported(transition: Transition, node: str, report: wire.Evaluated) -> None:
    """A node's part of the held-out loss."""
    evaluation, attempt = transition.state.evaluation, (report.step, report.generation)
    if evaluation is None or (evaluation.step, evaluation.generation) != attempt or node not in evaluation.expected:
        transition.log(f"ignored an evaluation of step {report.step} from {node}: none is awaited")
        return
    number, due = len(report.losses), len(evaluation.expected[node])
    require(number == due, "losses", number, f"{due}, one for each of its held-out micro-batches")
    if node in evaluation.reports:
        transition.log(f"ignored a second evaluation of step {report.step} from {node}")
        return
    if not is_finite(*report.losses):
        lost(transition, f"{node} says it is {math.fsum(report.losses)}")
        return
    evaluation = replace(evaluation, reports={**evaluation.reports, node: tuple(report.losses)})
    transition.state = replace(transition.state, evaluation=evaluation)
    if evaluation.reports.keys() == evaluation.expected.keys():
        _announce(transition, evaluation)


def lost(transition: Transition, why: str) -> None:
    """Gives up the held-out loss that is awaited, if there is one. The run goes on."""
    if (evaluation := transition.state.evaluation) is not None:
        transition.log(f"no held-out loss after step {evaluation.step}: {why}")
        transition.state = replace(transition.state, evaluation=None)


def failed(transition: Transition, node: str, sentence: str) -> None:
    """The node could not do its part in the evaluation after the last step, if it had a part."""
    evaluation = transition.state.evaluation
    if evaluation is not None and any(node in chain for chain in evaluation.chains):
        lost(transition, f"{node}: {sentence}")


def node_left(transition: Transition, node: str) -> None:
    """The node's part of the held-out loss will not come."""
    evaluation = transition.state.evaluation
    if evaluation is not None and node in evaluation.expected.keys() - evaluation.reports.keys():
        lost(transition, f"{node} left before its part was evaluated")


def _announce(transition: Transition, evaluation: Evaluation) -> None:
    """Logs the held-out loss when all nodes have reported. Samples with two different losses do not count. The contradiction is
    known to lie between two nodes only if their two chains differ in nothing except their ends."""
    state, described = transition.state, transition.state.ledger.description
    step, count = evaluation.step, _held_out(state)
    agreed, disputed, pairs = list[float](), set[str](), set[Pair]()
    parts = evaluation.expected.items()
    losses = dict(pair for end, own in parts for pair in zip(own, evaluation.reports[end], strict=True))
    for number in range(count):
        both = range(number, len(evaluation.chains), count)
        told = [losses[each] for each in both]
        if not _differ(state, told):
            agreed.append(math.fsum(told) / len(told))
            continue
        one, other = (frozenset(evaluation.chains[each]) for each in both)
        disputed |= one ^ other
        if len(one ^ other) == len({*map(state.ledger.party, one ^ other)}) == 2:
            pairs.add(pair_of(*(one ^ other)))
    if pairs:
        reason = f"after step {step} they report different losses of the same held-out samples"
        transition.find(contradicting(Charge.EVALUATION, sorted(pairs), reason))
    if disputed:
        nodes = name_first(sorted(disputed))
        transition.log(
            f"{count - len(agreed)} of {count} held-out micro-batches do not count: one of {nodes} is at fault"
        )
    if not agreed:
        lost(transition, "no two chains report the same")
        return
    samples = len(agreed) * state.run.train.micro_batch
    transition.emit(ev.Evaluated(step, math.fsum(agreed) / len(agreed), samples, described.unigram_entropy))
    spikes.look(transition, "held-out")
    transition.state = replace(transition.state, evaluation=None)


def _differ(state: State, told: Sequence[float]) -> bool:
    """Whether the losses differ by more than rounding explains."""
    codecs = allowed_codecs(state.run.network, "activations")
    most = max(tolerance(state.run.train.precision, codec) for codec in codecs)
    return max(told) - min(told) > most * max(map(abs, told))


def _held_out(state: State) -> int:
    """The number of held-out micro-batches."""
    return state.run.train.evaluation_samples // state.run.train.micro_batch
