"""Replicas do each other's work again, on real stages in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtfm.coordinator.core.trust.passed import differing, lacks, read_passed, sent_several_sums
from dtfm.kernels.codec import Codec
from dtfm.node.model import loss
from dtfm.node.training.audits.step_again import LARGEST_ERROR, misfit
from dtfm.node.training.reduction.bucket_sum import BucketSum
from dtfm.node.training.reduction.reducer import Reduction
from dtfm.node.training.step.outgoing import Outgoing
from dtfm.node.training.step.progress import Progress
from dtfm.protos.control_pb2 import Audit
from dtfm.protos.frame import Kind
from dtfm.protos.peer_pb2 import KeptRequest
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from tests.cluster.runs import GPT2, LLAMA, run_file
from tests.coordinator.core.trust.test_passed import described
from tests.node.in_process import InProcess, even_plan, nodes_of
from tests.node.training.audits.auditors import Auditors, errors
from tests.unequal import unequal_run

MICRO_BATCHES = 10
#: By stage, two replicas each.
STAGES = (("n0", "n1"), ("n2", "n3"), ("n4", "n5"))
NOTHING = -1.0

Nodes = Callable[..., AbstractContextManager[InProcess]]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Three stages of two replicas, or one, of a run whose work is audited."""

    @contextmanager
    def nodes(
        model: str = GPT2,
        precision: str = "fp32",
        compression: str = "off",
        rate: float = 1,
        stages: int = 3,
        keeping: tuple[Keeping, ...] = (),
    ) -> Iterator[InProcess]:
        monkeypatch.chdir(tmp_path)
        text = run_file(model=model, stages=[2] * stages, steps=4, precision=precision, compression=compression)
        with nodes_of(f"{text}[trust]\naudit_rate = {rate}\n", stages, 2, *keeping) as nodes:
            yield nodes

    return nodes


@pytest.mark.parametrize("compression", ["off", "i8b256", "i4b64"])
def test_the_two_ends_of_each_hop_vote_the_same_digests(trained: Nodes, compression: str) -> None:
    with trained(compression=compression) as nodes:
        step = Auditors(nodes)
        for name, sent in step.sent.items():
            for (peer, kind, index, part), digest in sent.items():
                assert step.received[peer].pop((name, kind, index, part)) == digest
        assert not any(step.received.values()), "nothing came that nobody voted to have sent"
        kinds = {kind for sent in step.sent.values() for _, kind, _, _ in sent}
        assert kinds == {Kind.ACTIVATION, Kind.GRADIENT, Kind.REDUCE, Kind.GATHER}
        assert all(vote.kept for vote in step.votes.values())
        assert [len(vote.losses) for vote in step.votes.values()] == [0, 0, 0, 0, 5, 5]


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_the_coordinator_finds_honest_votes_whole(trained: Nodes, model: str) -> None:
    with trained(model=model) as nodes:
        votes = Auditors(nodes).votes
        told = {
            node: read_passed(vote, nodes.plan, node, described(nodes.plan, tied=90)) for node, vote in votes.items()
        }
        assert not any(lacks(nodes.plan, node, passed) for node, passed in told.items())
        assert not any(sent_several_sums(passed) for passed in told.values())
        assert differing(told) == []


def test_a_run_that_is_not_audited_votes_nothing_of_it(trained: Nodes) -> None:
    with trained(rate=0) as nodes:
        for vote in Auditors(nodes).votes.values():
            assert (len(vote.sent), len(vote.received), len(vote.losses), vote.kept) == (0, 0, 0, False)


@pytest.mark.parametrize(
    ("model", "precision", "compression"),
    [
        pytest.param(GPT2, "fp32", "off", marks=pytest.mark.soak),
        (GPT2, "bf16", "i4b64"),
        pytest.param(GPT2, "fp32", "auto", marks=pytest.mark.soak),
        pytest.param(LLAMA, "bf16", "off", marks=pytest.mark.soak),
        (LLAMA, "fp32", "i8b256"),
    ],
    ids=["gpt2-fp32-off", "gpt2-bf16-i4b64", "gpt2-fp32-auto", "llama-bf16-off", "llama-fp32-i8b256"],
)
def test_honest_work_comes_to_the_same_bits_in_every_stage(
    trained: Nodes, model: str, precision: str, compression: str
) -> None:
    with trained(model, precision, compression) as nodes:
        step = Auditors(nodes)
        for accused, auditor in STAGES:
            generation = nodes.generations[auditor]
            before = {index: bucket.gradients.clone() for index, bucket in generation.stage.buckets.items()}
            first, last = accused == "n0", accused == "n4"
            wanted = (NOTHING if last else 0.0, NOTHING if first else 0.0, NOTHING, 0.0 if last else NOTHING)
            assert errors(step.answer(auditor, step.asked(accused))) == wanted, "bits are equal"
            for bucket in generation.stage.buckets:
                audit = step.asked(accused, bucket=bucket)
                found = errors(step.answer(auditor, audit))
                assert (found[0], found[1], found[3]) == (wanted[0], wanted[1], wanted[3])
                of_a_norm = all(len(shape) < 2 for _, shape in generation.stage.buckets[bucket].spec.parameters)
                if of_a_norm and precision == "bf16":
                    assert found[2] == NOTHING, "its sum depends on the number of threads"
                elif (
                    audit.pieces or audit.sums
                ):  # the bucket has fewer pieces than members, or one piece, below 256 elements
                    assert 0 <= found[2] < 1e-6, "the order in which micro-batches came may have been another"
            for index, gradients in before.items():
                assert torch.equal(gradients, generation.stage.buckets[index].gradients), (
                    "the voted sums are as they were"
                )
                parameters = generation.stage.parameters[index]
                views = generation.stage.buckets[index].views(generation.stage.buckets[index].gradients).values()
                for parameter, view in zip(parameters, views, strict=True):
                    assert parameter.grad is None or parameter.grad.data_ptr() == view.data_ptr()


def test_honest_work_comes_to_the_same_bits_where_tokens_count_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"{unequal_run(tmp_path, stages=[2, 2], steps=4)}[trust]\naudit_rate = 1\n"
    with nodes_of(text) as nodes:
        step = Auditors(nodes)
        for accused, auditor in (("n0", "n1"), ("n2", "n3")):
            for bucket in nodes.generations[auditor].stage.buckets:
                found = errors(step.answer(auditor, step.asked(accused, bucket=bucket)))
                assert all(error == NOTHING or 0 <= error < 1e-12 for error in found)
                assert (found[3] == 0.0) == (accused == "n2"), "the auditor finds the voted losses"


def test_replicas_that_keep_their_memory_in_other_ways_come_to_the_same_bits(trained: Nodes) -> None:
    keeping = (Keeping(), Keeping(Checkpointing.LAYER, OptimizerState.HOST))
    with trained(precision="bf16", keeping=keeping) as nodes:
        step = Auditors(nodes)
        for accused, by in (("n2", "n3"), ("n3", "n2")):
            found = errors(step.answer(by, step.asked(accused, bucket=min(nodes.generations[by].stage.buckets))))
            assert found[:2] == (0, 0)
            assert 0 <= found[2] < 1e-6


def test_the_loss_in_chunks_adds_nothing_to_the_voted_sums(trained: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the first chunk it would add the others' gradients by itself. The head's own bucket does not change either."""
    monkeypatch.setattr(loss, "LEAST_TOKENS", 16)
    monkeypatch.setattr(loss, "MOST_LOGITS_BYTES", 1)
    with trained() as nodes:
        step, last = Auditors(nodes), nodes.generations["n5"]
        before = {index: bucket.gradients.clone() for index, bucket in last.stage.buckets.items()}
        for bucket in (None, *before):
            found = errors(step.answer("n5", step.asked("n4", bucket=bucket)))
            assert (found[1], found[3]) == (0, 0)
            assert found[2] < 1e-6
        assert all(torch.equal(last.stage.buckets[index].gradients, was) for index, was in before.items())


def test_a_stage_that_is_the_whole_model_is_audited_from_the_data_alone(trained: Nodes) -> None:
    with trained(stages=1) as nodes:
        step = Auditors(nodes)
        mine = nodes.generations["n0"].placement.micro_batches[:2]
        assert errors(step.answer("n1", step.asked("n0", mine))) == (NOTHING, NOTHING, NOTHING, 0)
        assert not step.fetched


@contextmanager
def changed(nodes: InProcess, node: str, factor: float) -> Iterator[None]:
    """Inside, ``node`` computes with weights that are that many times as large."""
    stage = nodes.generations[node].stage
    before = {index: weights.clone() for index, weights in stage.weights.items()}
    with torch.no_grad():
        for weights in stage.weights.values():
            weights.mul_(factor)
    yield
    with torch.no_grad():
        for index, weights in stage.weights.items():
            weights.copy_(before[index])


def test_devices_that_round_otherwise_come_out_close_and_not_equal(trained: Nodes) -> None:
    with trained() as nodes:
        with changed(nodes, "n2", 1 + 1e-6):
            step = Auditors(nodes)
        bucket = min(index for index in nodes.generations["n2"].stage.buckets)
        activations, gradients, addends, _ = errors(step.answer("n3", step.asked("n2", bucket=bucket)))
        assert 0 < activations < 1e-4
        assert 0 < gradients < 1e-4
        assert 0 < addends < 1e-4
        its = {(wanted.node, wanted.kind) for wanted in step.fetched if wanted.node == "n2"}
        assert its == {("n2", Kind.ACTIVATION), ("n2", Kind.GRADIENT), ("n2", Kind.REDUCE)}


@pytest.mark.parametrize("compression", ["off", "i8b256"])
def test_a_bias_of_a_twentieth_comes_out_as_such(
    trained: Nodes, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trained(compression=compression) as nodes:
        liar = nodes.generations["n2"]
        hand_on, keep = Outgoing.hand_on, liar.reducer.reduce

        def biased(self: Outgoing, kind: Kind, destination: str, number: int, tensor: torch.Tensor) -> None:
            lies = kind is Kind.ACTIVATION and self.placement is liar.placement
            hand_on(self, kind, destination, number, tensor * 1.05 if lies else tensor)

        def reduce(step: int, gradients: dict[int, torch.Tensor], codec: Codec, kept: Any) -> None:
            make_final = Reduction._make_final

            def more(self: Reduction, bucket: BucketSum) -> None:
                if self._reducer is liar.reducer:
                    bucket.gradients.mul_(1.05)
                make_final(self, bucket)

            monkeypatch.setattr(Reduction, "_make_final", more)
            keep(step, gradients, codec, kept)

        monkeypatch.setattr(Outgoing, "hand_on", biased)
        monkeypatch.setattr(liar.reducer, "reduce", reduce)
        step = Auditors(nodes)
        found = errors(step.answer("n3", step.asked("n2", bucket=min(liar.stage.buckets))))
        assert found[0] == pytest.approx(0.05, abs=1e-3 if compression == "off" else 5e-3)
        assert found[1] == 0
        assert found[2] == pytest.approx(0.05, abs=1e-3 if compression == "off" else 5e-3)


@pytest.mark.parametrize("compression", ["off", "i8b256"])
def test_what_an_owner_makes_of_the_addends_is_compared_too(
    trained: Nodes, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """Also its own share of the sum, which it sends to nobody."""
    with trained(compression=compression) as nodes:
        liar, add_up = nodes.generations["n2"], BucketSum.add_up

        def twice(self: BucketSum, number: int, *rest: Any) -> None:
            add_up(self, number, *rest)
            if any(bucket.gradients is self.gradients for bucket in liar.stage.buckets.values()):
                self.piece(number).mul_(2)

        monkeypatch.setattr(BucketSum, "add_up", twice)
        step, bucket = Auditors(nodes), min(liar.stage.buckets)
        audit = step.asked("n2", bucket=bucket)
        assert audit.sums
        assert errors(step.answer("n3", audit))[2] == pytest.approx(1, rel=0.01)
        audit.sums[0].addends[0].node = "n0"
        assert step.answer("n3", audit).problem.startswith("UNUSABLE")
        del audit.sums[:]
        assert errors(step.answer("n3", audit))[2] < 1e-6


def test_a_piece_that_cannot_be_compared_hides_nothing_of_the_others(trained: Nodes) -> None:
    with trained() as nodes:
        with changed(nodes, "n2", 1.5):
            step = Auditors(nodes)
        audit = step.asked("n2", bucket=min(nodes.generations["n2"].stage.buckets))
        audit.pieces.insert(0, Audit.Piece(piece=4002, digest=bytes(16), bucket=audit.bucket))
        audit.sums[0].addends[0].node = "n0"
        answer = step.answer("n3", audit)
        assert answer.problem.startswith("UNUSABLE: piece 4002")
        assert answer.addends > 0.1


def test_a_lie_about_the_loss_comes_out(trained: Nodes) -> None:
    with trained(stages=1) as nodes:
        step = Auditors(nodes)
        audit = step.asked("n0", [0])
        audit.micro_batches[0].loss *= 0.9
        assert errors(step.answer("n1", audit))[3] == pytest.approx(0.1)
        audit.micro_batches[0].loss = float("nan")
        assert errors(step.answer("n1", audit))[3] == LARGEST_ERROR


def test_who_hands_out_another_tensor_or_none_is_named(trained: Nodes) -> None:
    with trained() as nodes:
        step = Auditors(nodes)
        audit = step.asked("n2", [step.votes["n2"].sent[0].indices[0]])
        for field, by in (
            ("activation_in", "n0"),
            ("gradient_in", "n4"),
            ("activation_out", "n2"),
            ("gradient_out", "n2"),
        ):
            asked = Audit.FromString(audit.SerializeToString())
            setattr(asked.micro_batches[0], field, bytes(16))
            answer = step.answer("n3", asked)
            assert (answer.withheld_by, answer.problem[:9]) == (by, "WITHHELD:")
        nodes.generations["n0"].progress.spoil()
        assert step.answer("n3", audit).withheld_by == "n0"


def test_what_does_not_fit_is_not_answered(trained: Nodes) -> None:
    with trained() as nodes:
        step, generation = Auditors(nodes), nodes.generations["n3"]
        good = step.asked("n2", bucket=min(generation.stage.buckets))
        assert not misfit(good, generation, 1)

        def wrong(**fields: Any) -> str:
            asked = Audit.FromString(good.SerializeToString())
            for name, value in fields.items():
                setattr(asked, name, value)
            return misfit(asked, generation, 1)

        assert "generation 2" in wrong(generation=2)
        assert "step 2" in wrong(step=2)
        assert "no step" in misfit(good, generation, None)
        assert "no step" in misfit(good, None, None)
        assert "'n3'" in wrong(node="n3")
        assert "'n0'" in wrong(node="n0")
        assert "buckets [0]" in wrong(bucket=0)
        twice, beyond, ends = (Audit.FromString(good.SerializeToString()) for _ in range(3))
        twice.micro_batches.append(good.micro_batches[0])
        beyond.micro_batches[0].number = MICRO_BATCHES
        ends.micro_batches[0].next = ""
        for asked in (twice, beyond, ends):
            assert "micro-batch" in misfit(asked, generation, 1)
        del good.micro_batches[:]
        assert misfit(good, generation, 1)


def test_what_was_not_sent_is_not_handed_out(trained: Nodes) -> None:
    with trained() as nodes:
        Auditors(nodes)
        offer, bucket = nodes.generations["n2"].offer(1), min(nodes.generations["n2"].stage.buckets)
        for kind, index, part in (
            (Kind.ACTIVATION, 99, 0),
            (Kind.ACTIVATION, 0, 1),
            (Kind.GATHER, bucket, 1),
            (Kind.STATE, bucket, 0),
            (Kind.REDUCE, bucket, 0),  # its own piece
            (Kind.REDUCE, bucket, 99),
            (Kind.REDUCE, 0, 1),
            (77, 0, 0),
        ):
            with pytest.raises(LookupError, match="NOT_KEPT"):
                offer.find(KeptRequest(generation=1, step=1, kind=kind, index=index, part=part))


def test_a_step_that_goes_on_in_another_generation_votes_nothing_of_it(trained: Nodes) -> None:
    with trained() as nodes:
        nodes.interrupt(sent=20)
        nodes.go_on(replace(even_plan(5, 3, 2, MICRO_BATCHES), generation=2))
        goes_on = [name for name, generation in nodes.generations.items() if not generation.progress.reports_nothing]
        assert goes_on
        votes = Auditors(nodes).votes
        for name in goes_on:
            assert (len(votes[name].sent), len(votes[name].received), votes[name].kept) == (0, 0, False)


@pytest.mark.parametrize("sent", [1, 3])
def test_what_is_sent_again_in_a_step_of_which_nobody_has_anything_is_committed_to(trained: Nodes, sent: int) -> None:
    """The first stage alone has done something, and reports no progress: for the coordinator the step begins."""
    with trained() as nodes:
        nodes.interrupt(sent)
        for name in (name for stage in STAGES[1:] for name in stage):
            nodes.generations[name].progress = Progress(1, 1)
        nodes.go_on(replace(even_plan(5, 3, 2, MICRO_BATCHES), generation=2))
        assert any(nodes.generations[name].progress.sent for name in STAGES[0])
        step = Auditors(nodes)
        for name, passed in step.sent.items():
            for (peer, kind, index, part), digest in passed.items():
                assert step.received[peer][name, kind, index, part] == digest
        assert errors(step.answer("n1", step.asked("n0"))) == (0, NOTHING, NOTHING, NOTHING)
        assert errors(step.answer("n3", step.asked("n2")))[:2] == (0, 0)
