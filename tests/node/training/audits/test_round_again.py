"""An island of one node does a round of another one again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dtfm.coordinator.core.step.commits import learning_rate
from dtfm.coordinator.core.trust.tolerance import OF_ROUNDS, tolerance
from dtfm.kernels.codec import Codec
from dtfm.node.state.state_store import HeldState, StateStore
from dtfm.node.state.update import unpack
from dtfm.node.training.audits.round_again import round_done_again
from dtfm.node.training.audits.step_again import NOTHING_COMPARED, misfit
from dtfm.node.transport.commitments import commitment
from dtfm.protos.control_pb2 import Audit
from dtfm.protos.frame import Kind
from dtfm.protos.peer_pb2 import KeptRequest, StandbyRequest, StateRequest
from dtfm.protos.plan_pb2 import BF16, FP32, FP64, Run
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.plan import Plan, joined
from tests.attacks.twisted import adding, adding_up_wrong
from tests.cluster.plain import losses_of_islands
from tests.cluster.runs import GPT2, run_file, write_corpus
from tests.node.in_process import InProcess
from tests.node.training.audits.auditors import Auditors, errors
from tests.node.training.test_islands import EVENLY, PIPELINE, REPLICAS, ROUNDS, island, shares, started as started_with
from tests.unequal import unequal_run

ALONE = joined([island(0, (0, 5), [["a"]], [2]), island(1, (0, 5), [["b"]], [5]), island(4, (0, 5), [["c"]], [3])], 1)
MIXED = joined([island(0, (0, 5), [["a"]], [2]), PIPELINE, REPLICAS], 1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    text = run_file(model=GPT2, stages=[6], steps=3 * (ROUNDS + 1)).replace("stages = [6]\n", "")
    (tmp_path / "run.toml").write_text(text)
    run = read_run_file(tmp_path / "run.toml").message("test")
    run.trust.audit_rate = 0.02
    return run


def trained_by(run: Run, plan: Plan, node: str, first: int, last: int) -> list[Audit.Trained]:
    number = plan.island_of(node)
    assert number is not None
    mine = [shares(plan, step)[number] for step in range(first, last + 1)]
    return [
        Audit.Trained(
            learning_rate=learning_rate(run.train, step),
            borders=[of_step[0], of_step[-1] + 1],
            clip_norm=run.train.clip_norm,
            weight_decay=run.train.weight_decay,
        )
        for step, of_step in zip(range(first, last + 1), mine, strict=True)
    ]


def started(run: Run, plan: Plan) -> InProcess:
    return started_with(run, plan, replace(EVENLY, restarts=True))


@contextmanager
def at_the_second_exchange(run: Run, plan: Plan) -> Iterator[Auditors]:
    with started(run, plan) as nodes:
        for _ in range(2 * ROUNDS + 1):
            nodes.train()
        yield Auditors(nodes)


def second_round(run: Run, plan: Plan, node: str) -> list[Audit.Trained]:
    return trained_by(run, plan, node, ROUNDS + 2, 2 * ROUNDS + 1)


@pytest.mark.soak
def test_each_round_begins_with_moments_of_zero_where_work_is_audited(run: Run) -> None:
    alone = losses_of_islands(run, partial(shares, MIXED), EVENLY.exchanges)
    with started(run, MIXED) as nodes:
        for step in range(1, run.train.steps + 1):
            loss, expected = nodes.train(), next(alone)
            if step % (ROUNDS + 1):
                assert loss == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize("codec", [pytest.param("off", marks=pytest.mark.soak), "i4b64"])
@pytest.mark.parametrize(
    ("by", "node"), [("a", "b"), *(pytest.param(*pair, marks=pytest.mark.soak) for pair in [("b", "c"), ("c", "a")])]
)
def test_a_round_done_again_is_the_same_to_the_bit(run: Run, codec: str, by: str, node: str) -> None:
    """What the node sent of each bucket, and the sums that it made."""
    run.network.exchange = codec
    with at_the_second_exchange(run, ALONE) as auditors:
        for bucket in auditors.nodes.generations[by].stage.buckets:
            audit = auditors.asked_of_round(node, bucket, second_round(run, ALONE, node))
            assert audit.pieces or audit.sums
            assert errors(auditors.answer(by, audit)) == (NOTHING_COMPARED, NOTHING_COMPARED, 0.0, NOTHING_COMPARED)


@pytest.mark.soak
def test_a_round_done_again_is_the_same_to_the_bit_where_tokens_count_alike(run: Run, tmp_path: Path) -> None:
    """Each island trains the mean over its own learnt tokens, so that an auditor needs nothing of other islands."""
    (tmp_path / "run.toml").write_text(unequal_run(tmp_path, stages=[1], steps=3 * (ROUNDS + 1)))
    run.data.CopyFrom(read_run_file(tmp_path / "run.toml").message("test").data)
    run.train.loss_per_token, run.network.exchange = True, "off"
    with at_the_second_exchange(run, ALONE) as auditors:
        for bucket in auditors.nodes.generations["a"].stage.buckets:
            audit = auditors.asked_of_round("b", bucket, second_round(run, ALONE, "b"))
            assert errors(auditors.answer("a", audit))[2] == 0.0


@pytest.mark.soak
def test_a_round_done_again_leaves_all_as_it_was(run: Run) -> None:
    alone = losses_of_islands(run, partial(shares, ALONE), EVENLY.exchanges)
    with at_the_second_exchange(run, ALONE) as auditors:
        nodes = auditors.nodes
        buckets = nodes.generations["a"].stage.buckets.values()
        before = [(bucket.digests(), bucket.gradients.clone()) for bucket in buckets]
        auditors.answer("a", auditors.asked_of_round("b", 0, second_round(run, ALONE, "b")))
        for bucket, (digests, gradients) in zip(buckets, before, strict=True):
            assert bucket.digests() == digests
            assert torch.equal(bucket.gradients, gradients)
        nodes.go_on(replace(nodes.plan, generation=2))  # the exchange is done again
        nodes.train()
        expected = [*itertools.islice(alone, 2 * ROUNDS + 3)][-1]
        assert nodes.train() == pytest.approx(expected, rel=1e-9, abs=0)


def test_replicas_of_an_island_audit_each_others_changes_without_training(run: Run) -> None:
    with at_the_second_exchange(run, MIXED) as auditors:
        for bucket in auditors.nodes.generations["d"].stage.buckets:
            assert errors(auditors.answer("e", auditors.asked_of_round("d", bucket, ())))[2] == 0.0


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(one, marks=pytest.mark.soak) for one in ("fp64", "bf16"))]
)
@pytest.mark.parametrize("codec", [pytest.param("off", marks=pytest.mark.soak), "i4b64"])
@pytest.mark.parametrize("what", ["change", "sum"])
def test_a_wrong_change_or_sum_is_found(run: Run, precision: str, codec: str, what: str) -> None:
    run.network.exchange = codec
    run.train.precision = {"fp64": FP64, "fp32": FP32, "bf16": BF16}[precision]
    with started(run, ALONE) as nodes:
        for _ in range(ROUNDS):
            nodes.train()
        with adding(lambda mine: -mine) if what == "change" else adding_up_wrong():  # all of them
            auditors = Auditors(nodes)
            audit = auditors.asked_of_round("b", 2, trained_by(run, ALONE, "b", 1, ROUNDS))
            del audit.sums[: len(audit.sums) * (what == "change")]
            del audit.pieces[: len(audit.pieces) * (what == "sum")]
            assert errors(auditors.answer("a", audit))[2] > 2 * tolerance(precision, codec, OF_ROUNDS)


@pytest.mark.soak
def test_standbys_and_others_get_what_the_node_has_voted_for_while_it_does_a_round_again(run: Run) -> None:
    async def subscribed() -> None:
        with at_the_second_exchange(run, ALONE) as auditors:
            generation = auditors.nodes.generations["a"]
            bucket, codec = generation.stage.buckets[2], generation.codecs.exchange
            store, summed = StateStore(), bucket.gradients.clone()
            store.replace(HeldState(auditors.nodes.step, generation.stage.buckets, generation.placement.rounds))
            store.vote(1, codec)
            subscription = store.subscribe(StandbyRequest(buckets=[2], shared=True), asyncio.get_running_loop())
            refused = StateRequest(bucket=2, step=auditors.nodes.step, generation=1)
            with round_done_again(generation, second_round(run, ALONE, "b"), lambda: None, store.set_aside):
                assert not torch.equal(bucket.gradients, summed)
                _, pieces = store.start(subscription, 2)
                assert b"".join(pieces) == bytes(bucket.read(shared=True))
                with pytest.raises(LookupError, match="has the state of another, whose work it does again"):
                    store.donate(refused)
            await asyncio.sleep(0)
            ((header, data),) = subscription._waiting[2]
            came, _ = unpack(Codec(header.codec), bytearray(data), bucket.spec.size, summed.dtype)
            assert torch.equal(came, summed)
            store.donate(refused)

    asyncio.run(subscribed())


def test_who_has_no_room_for_its_own_state_beside_does_nothing_again(run: Run) -> None:
    with at_the_second_exchange(run, ALONE) as auditors:
        auditors.nodes.generations["a"].free_bytes = 1000
        with pytest.raises(MemoryError, match="are needed to put its own state aside, 1,000 are free"):
            auditors.answer("a", auditors.asked_of_round("b", 0, second_round(run, ALONE, "b")))


@pytest.mark.soak
def test_what_was_sent_in_an_exchange_is_handed_out_however_little_room_there_is(run: Run) -> None:
    """For what an interrupted step needs there may be none."""
    with at_the_second_exchange(run, ALONE) as auditors:
        assert all(vote.kept for vote in auditors.votes.values())
        generation = auditors.nodes.generations["b"]
        generation.progress.room = 0
        for _, kind, index, part in auditors.sent["b"]:
            if kind == Kind.REDUCE:
                request = KeptRequest(generation=1, step=auditors.step, kind=kind, index=index, part=part)
                header, encoded = generation.offer(auditors.step).find(request)
                assert commitment(header.codec, encoded) in auditors.sent["b"].values()


@pytest.mark.soak
def test_no_honest_change_is_clipped_whatever_the_shares(run: Run) -> None:
    """Also of nodes that hold a bucket and have less than a micro-batch for each of them."""
    run.trust.mode = Run.Trust.OPEN
    plan = joined(
        [island(0, (0, 5), [["a"]], [8]), island(1, (0, 2, 5), [["b"], ["c"]], [1]), island(2, (0, 5), [["d"]], [1])], 1
    )
    with started(run, plan) as nodes:
        for _ in range(run.train.steps):
            nodes.train()
            assert not any(generation.exchanger.clipped for generation in nodes.generations.values())
        tied = [group.loads for group in nodes.generations["a"].placement.exchange_groups.values()]
        assert (8, 0.5, 0.5, 1) in tied


def test_steps_of_moments_are_counted_from_where_their_round_began(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = list[int]()

    def noted(_train: object, number: int, *_: object) -> None:
        numbers.append(number)

    monkeypatch.setattr("dtfm.node.training.generation.inner_step", noted)
    with started(run, island(0, (0, 5), [["a"]], [10])) as nodes:
        for _ in range(2 * ROUNDS):
            nodes.train()
    assert [number for number, _ in itertools.groupby(numbers)] == [1, 2, 3, 1, 2]


def test_a_wrong_change_is_found_in_whatever_bucket_it_is(run: Run) -> None:
    """One is drawn, whose sums are made again. Changes are compared of all."""
    with started(run, ALONE) as nodes:
        for _ in range(ROUNDS):
            nodes.train()
        size = nodes.generations["b"].stage.buckets[0].spec.size
        with adding(lambda mine: -mine if mine.numel() == size else mine):
            auditors = Auditors(nodes)
        audit = auditors.asked_of_round("b", 2, trained_by(run, ALONE, "b", 1, ROUNDS))
        assert errors(auditors.answer("a", audit))[2] > 1


@pytest.mark.soak
def test_what_does_not_fit_is_not_done_again(run: Run) -> None:
    with at_the_second_exchange(run, MIXED) as auditors:
        step, audit = auditors.step, auditors.asked_of_round("b", 0, second_round(run, MIXED, "b"))

        def why(by: str, change: Audit) -> str:
            return misfit(change, auditors.nodes.generations[by], step)

        def changed(**fields: object) -> Audit:
            other = Audit()
            other.CopyFrom(audit)
            for name, value in fields.items():
                setattr(other, name, value)
            return other

        assert not why("a", audit)
        assert "does not have the whole model" in why("d", audit)
        assert "is no other node" in why("a", changed(node="a"))
        assert "is no other node" in why("a", changed(node="zz"))
        without = changed()
        without.ClearField("bucket")
        assert "names no bucket" in why("a", without)
        shorter = changed()
        del shorter.trained[0]
        assert "3 steps came before" in why("a", shorter)
        endless = changed()
        endless.trained[0].borders[-1] = 1 << 60
        assert "of 10 at most" in why("a", endless)
