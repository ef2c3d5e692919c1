"""An island of one node does a round of another one again."""

from __future__ import annotations

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
from dtfm.node.training.audit import NOTHING_COMPARED, misfit
from dtfm.protos.control_pb2 import Audit
from dtfm.protos.plan_pb2 import BF16, FP32, FP64, Run
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.plan import Plan, joined
from tests.attacks.twisted import adding, adding_up_wrong
from tests.cluster.plain import losses_of_islands
from tests.cluster.runs import GPT2, run_file, write_corpus
from tests.node.training.auditors import Auditors, errors
from tests.node.training.test_islands import EVENLY, PIPELINE, REPLICAS, ROUNDS, island, shares, started

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
        Audit.Trained(learning_rate=learning_rate(run.train, step), borders=[of_step[0], of_step[-1] + 1])
        for step, of_step in zip(range(first, last + 1), mine, strict=True)
    ]


@contextmanager
def at_the_second_exchange(run: Run, plan: Plan) -> Iterator[Auditors]:
    with started(run, plan) as nodes:
        for _ in range(2 * ROUNDS + 1):
            nodes.train()
        yield Auditors(nodes)


def second_round(run: Run, plan: Plan, node: str) -> list[Audit.Trained]:
    return trained_by(run, plan, node, ROUNDS + 2, 2 * ROUNDS + 1)


def test_each_round_begins_with_moments_of_zero_where_work_is_audited(run: Run) -> None:
    alone = losses_of_islands(run, partial(shares, MIXED), EVENLY.exchanges)
    with started(run, MIXED) as nodes:
        for step in range(1, run.train.steps + 1):
            loss, expected = nodes.train(), next(alone)
            if step % (ROUNDS + 1):
                assert loss == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize("codec", ["off", "i4b64"])
@pytest.mark.parametrize(("by", "node"), [("a", "b"), ("b", "c"), ("c", "a")])
def test_a_round_done_again_is_the_same_to_the_bit(run: Run, codec: str, by: str, node: str) -> None:
    """What the node sent of each bucket, and the sums that it made."""
    run.network.exchange = codec
    with at_the_second_exchange(run, ALONE) as auditors:
        for bucket in auditors.nodes.generations[by].stage.buckets:
            audit = auditors.asked_of_round(node, bucket, second_round(run, ALONE, node))
            assert audit.pieces or audit.sums
            assert errors(auditors.answer(by, audit)) == (NOTHING_COMPARED, NOTHING_COMPARED, 0.0, NOTHING_COMPARED)


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


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("codec", ["off", "i4b64"])
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
