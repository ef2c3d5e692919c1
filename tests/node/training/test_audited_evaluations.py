"""Evaluations are done again by other replicas, in the step right after them: on real stages in one process."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.trust.passed import differing, lacks, read_passed
from dtfm.node.training.audit import misfit
from dtfm.node.training.vote import vote_on_evaluation
from dtfm.protos.control_pb2 import Audit, Audited
from dtfm.protos.frame import Kind
from dtfm.protos.peer_pb2 import KeptRequest
from tests.attacks.twisted import LIES
from tests.cluster.runs import GPT2, LLAMA
from tests.node.in_process import InProcess
from tests.node.training.auditors import Auditors
from tests.node.training.test_audit import NOTHING, STAGES, Nodes, trained

__all__ = ["trained"]

HELD_OUT = 4
"""Micro-batches in an evaluation."""


def evaluated(nodes: InProcess) -> Auditors:
    """The step after an evaluation, trained and voted on."""
    nodes.train()
    nodes.evaluate()
    return Auditors(nodes)


def error(answer: Audited) -> float:
    """Of the evaluation, where nothing else is compared."""
    assert not answer.problem, answer
    assert (answer.activations, answer.gradients, answer.addends, answer.losses) == (NOTHING,) * 4
    return answer.evaluations


@pytest.mark.parametrize(
    ("model", "precision", "compression"),
    [(GPT2, "fp32", "off"), (GPT2, "bf16", "i4b64"), (LLAMA, "bf16", "off"), (LLAMA, "fp32", "auto")],
    ids=["gpt2-fp32-off", "gpt2-bf16-i4b64", "llama-bf16-off", "llama-fp32-auto"],
)
def test_honest_evaluations_come_to_the_same_bits_in_every_stage(
    trained: Nodes, model: str, precision: str, compression: str
) -> None:
    with trained(model, precision, compression) as nodes:
        step = evaluated(nodes)
        for accused, auditor in STAGES:
            assert error(step.answer(auditor, step.asked_held_out(accused))) == 0.0
            needed = {(wanted.node in STAGES[0] + STAGES[1], wanted.kind) for wanted in step.fetched}
            assert needed == (set() if accused == "n0" else {(True, Kind.EVALUATION)}), "from the stage before alone"


def test_a_vote_names_what_went_on_in_the_evaluation_before_it_at_both_ends(trained: Nodes) -> None:
    with trained() as nodes:
        step = evaluated(nodes)
        plan, votes = nodes.plan, step.votes
        told = {node: read_passed(vote, plan, node, 100, HELD_OUT) for node, vote in votes.items()}
        assert not any(lacks(plan, node, passed, HELD_OUT) for node, passed in told.items())
        assert differing(told) == []
        named = [hop[3] for passed in told.values() for hop in passed.sent if hop[2] == Kind.EVALUATION]
        assert sorted(named) == sorted([*range(HELD_OUT)] * 2), "between three stages"
        assert all(vote.kept and vote.kept_evaluation for vote in votes.values())


def test_the_last_evaluation_is_voted_on_without_a_step(trained: Nodes) -> None:
    with trained() as nodes:
        nodes.train()
        nodes.evaluate()
        votes = {name: vote_on_evaluation(each, nodes.step + 1, b"") for name, each in nodes.generations.items()}
        told = {node: read_passed(vote, nodes.plan, node, 100, HELD_OUT, trained=False) for node, vote in votes.items()}
        assert not any(lacks(nodes.plan, node, passed, HELD_OUT, trained=False) for node, passed in told.items())
        assert differing(told) == []
        assert all(vote.kept_evaluation and not (vote.samples or vote.losses) for vote in votes.values())
        generation = nodes.generations["n0"]
        number = generation.placement.evaluation_micro_batches[0]
        request = KeptRequest(generation=1, step=nodes.step + 1, kind=Kind.EVALUATION, index=number)
        assert generation.offer(nodes.step + 1).find(request)


def test_the_next_step_says_nothing_of_it_any_more(trained: Nodes) -> None:
    with trained() as nodes:
        nodes.train()
        nodes.evaluate()
        nodes.train()
        assert not any(generation.evaluation for generation in nodes.generations.values())
        step = Auditors(nodes)
        assert not any(vote.kept_evaluation for vote in step.votes.values())
        assert Kind.EVALUATION not in {kind for sent in step.sent.values() for _, kind, _, _ in sent}
        with pytest.raises(LookupError, match="NOT_KEPT"):
            _hand_out(step, "n0")


def test_a_run_that_is_not_audited_keeps_nothing_of_evaluations(trained: Nodes) -> None:
    with trained(rate=0) as nodes:
        step = evaluated(nodes)
        assert not any(vote.kept_evaluation or vote.sent for vote in step.votes.values())


def test_half_the_loss_is_half_the_loss_off(trained: Nodes) -> None:
    with trained() as nodes:
        step = evaluated(nodes)
        audit = step.asked_held_out("n4", [0])
        audit.micro_batches[0].loss /= 2
        assert error(step.answer("n5", audit)) == pytest.approx(0.5)
        assert not [wanted for wanted in step.fetched if wanted.node == "n4"], "there is nothing to be withheld"


def test_who_passes_on_something_else_is_found_and_who_computes_with_it_is_not(trained: Nodes) -> None:
    with trained() as nodes, LIES["misevaluates"]():
        step = evaluated(nodes)
        assert error(step.answer("n1", step.asked_held_out("n0"))) == pytest.approx(0.05, rel=1e-3)
        assert error(step.answer("n5", step.asked_held_out("n4"))) == 0.0


def test_where_there_is_no_room_a_vote_says_so_and_still_names_all(
    trained: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of the step itself goes first."""
    with trained() as nodes:
        placement, sizes = nodes.generations["n0"].placement, nodes.generations["n0"].sizes
        shared = sum(size for index, size in sizes.buckets.items() if len(placement.groups[index].members) > 1)
    of_a_step = 4 * (shared + len(placement.micro_batches) * sizes.output)
    of_an_evaluation = 4 * len(placement.evaluation_micro_batches) * sizes.output
    for room, keeps in ((of_a_step + of_an_evaluation - 1, False), (of_a_step + of_an_evaluation, True)):
        monkeypatch.setattr("dtfm.node.training.generation.retry_bytes", lambda _, room=room: room)
        with trained() as nodes:
            step = evaluated(nodes)
            assert (step.votes["n0"].kept, step.votes["n0"].kept_evaluation) == (True, keeps)
            assert step.votes["n4"].kept_evaluation, "the last stage sends nothing"
            assert Kind.EVALUATION in {kind for _, kind, _, _ in step.sent["n0"]}
            if keeps:
                _hand_out(step, "n0")
                continue
            with pytest.raises(LookupError, match="NOT_KEPT"):
                _hand_out(step, "n0")


def test_an_evaluation_that_a_plan_does_not_have_is_not_done_again(trained: Nodes) -> None:
    with trained() as nodes:
        step = evaluated(nodes)
        auditor = nodes.generations["n1"]
        right = step.asked_held_out("n0")
        assert not misfit(right, auditor, step.step)
        too_many, none, of_a_bucket, first = Audit(), Audit(), Audit(), Audit()
        for changed in (too_many, none, of_a_bucket, first):
            changed.CopyFrom(right)
        too_many.micro_batches[0].number = HELD_OUT
        del none.micro_batches[:]
        of_a_bucket.bucket = 0
        first.micro_batches[0].previous = "n4"
        for changed, why in (
            (too_many, "an evaluation has 4"),
            (none, "each once"),
            (of_a_bucket, "no gradients"),
            (first, "other neighbours"),
        ):
            assert why in misfit(changed, auditor, step.step)


def _hand_out(step: Auditors, node: str) -> None:
    generation = step.nodes.generations[node]
    number = generation.placement.evaluation_micro_batches[0]
    request = KeptRequest(generation=generation.number, step=step.step, kind=Kind.EVALUATION, index=number)
    generation.offer(step.step).find(request)
