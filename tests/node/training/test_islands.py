"""Islands in one process: copies of the model that train by themselves, and agree in exchanges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dtfm.coordinator.core.step.outer_steps import OUTER_STEPS
from dtfm.kernels.codec import KEPT, Codec
from dtfm.node.data.load import load_data
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.optimizer.optimizer import Terms
from dtfm.node.training.generation import Generation
from dtfm.protos.outer import OuterStep, has_momentum
from dtfm.protos.plan_pb2 import CONSTANT, MUON, Run
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.chains import looked_at
from dtfm.scheduler.model.counted import Counted
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, joined
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds, spread
from tests.cluster.plain import held_out_loss_of, losses_of_islands, scheduled_rate
from tests.cluster.runs import GPT2, run_file, write_corpus
from tests.node.in_process import InProcess
from tests.node.load_once import load_once
from tests.unequal import unequal_run

ROUNDS = 3
EVENLY = spread(ROUNDS, 3 * (ROUNDS + 1))


def island(number: int, cuts: Sequence[int], names: Sequence[Sequence[str]], counts: Sequence[int]) -> Plan:
    """Stages between the ``cuts`` on these nodes; replica i of each stage computes ``counts[i]`` micro-batches."""
    stages = [Stage((a, b), tuple(group), ()) for a, b, group in zip(cuts, cuts[1:], names, strict=False)]
    routes = [([group[i % len(group)] for group in names], count) for i, count in enumerate(counts)]
    plan = from_routes(1, stages, routes)
    return replace(plan, stages=tuple(replace(stage, island=number) for stage in plan.stages))


ALONE = island(0, (0, 5), [["a"]], [2])
PIPELINE = island(1, (0, 2, 5), [["b"], ["c"]], [5])
REPLICAS = island(4, (0, 3, 5), [["d", "e"], ["f"]], [2, 1])


def shares(plan: Plan, step: int) -> Mapping[int, Sequence[int]]:
    numbers, found = itertools.count((EVENLY.trained(step) - 1) * 10), dict[int, list[int]]()
    for each in plan.islands:
        count = sum(each.stages[0].loads)
        found[each.stages[0].island] = [*itertools.islice(numbers, count)]
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    text = run_file(model=GPT2, stages=[6], steps=3 * (ROUNDS + 1)).replace("stages = [6]\n", "")
    (tmp_path / "run.toml").write_text(text.replace("[train]\n", "[train]\nouter_rate = 0.7\nouter_momentum = 0.9\n"))
    return read_run_file(tmp_path / "run.toml").message("test")


def started(run: Run, plan: Plan, rounds: Rounds = EVENLY) -> InProcess:
    data = load_data(run)
    model = load_once(run.model, data.sample)
    model.set_momentum(has_momentum(run.train))
    return InProcess(run, replace(plan, rounds=rounds), model, data, bandwidth=1e9, flops=1e12)


@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [("off", 1e-9), *(pytest.param(codec, 1e-2, marks=pytest.mark.soak) for codec in ("i4b64", "topk", "top64"))],
)
def test_each_step_and_each_exchange_is_that_of_one_process_with_as_many_copies(
    run: Run, codec: str, tolerance: float
) -> None:
    """Under a codec except at the ends of its blocks: the one process has all parameters in one."""
    run.network.exchange = codec
    plan = joined([ALONE, PIPELINE, REPLICAS], 1)
    alone = losses_of_islands(run, partial(shares, plan), EVENLY.exchanges)
    with started(run, plan) as nodes:
        assert {generation.codecs.exchange.name.lower() for generation in nodes.generations.values()} == {codec}
        for step in range(1, run.train.steps + 1):
            loss = nodes.train()
            expected = next(alone)
            if step % (ROUNDS + 1):
                assert loss == pytest.approx(expected, rel=tolerance, abs=0)
            else:
                assert_all_islands_have_the_same(nodes)


def test_with_a_batch_that_has_grown_islands_are_copies_that_train_more_samples_in_fewer_steps(run: Run) -> None:
    """Each step has two batches of the run file. Its rate is the schedule's after the samples that are then trained, times the
    root of two. After the first round the batch has grown once more, and then it is as it was."""
    run.network.exchange = "off"
    islands = [(0, (0, 5), [["a"]], 2), (1, (0, 2, 5), [["b"], ["c"]], 5), (4, (0, 3, 5), [["d"], ["e"]], 3)]
    layouts = {
        n: joined([island(i, cuts, names, [n * load]) for i, cuts, names, load in islands], 1) for n in (1, 2, 3)
    }
    first = Rounds(0, 3, 1, batches_each=2)
    second = Rounds(3, 3, 1, before=1, batches_each=3, ahead=2)
    third = Rounds(6, 2, 1, before=2, ahead=6)
    begun = {
        1: replace(layouts[2], rounds=first),
        4: replace(layouts[3], rounds=second),
        7: replace(layouts[1], rounds=third),
    }
    sizes = [2, 2, 0, 3, 3, 0, 1, 0]
    before = [sum(sizes[:step]) for step in range(len(sizes))]  # batches before each step
    done = [2, 4, 5, 8, 11, 12, 13, 14]  # of the run file's steps, after each

    def shares(step: int) -> Mapping[int, Sequence[int]]:
        numbers = itertools.count(before[step - 1] * 10)
        return {number: [*itertools.islice(numbers, load * sizes[step - 1])] for number, *_, load in islands}

    alone = losses_of_islands(
        run,
        shares,
        lambda step: not sizes[step - 1],
        rate=lambda run, step: scheduled_rate(run, done[step - 1]) * sizes[step - 1] ** 0.5,
    )
    with started(run, begun[1], first) as nodes:
        for step, batches in enumerate(sizes, start=1):
            if step in begun and step > 1:
                nodes.go_on(replace(begun[step], generation=step))
            loss, expected = nodes.train(), next(alone)
            if batches:
                assert loss == pytest.approx(expected, rel=1e-9, abs=0), f"step {step}"
            else:
                assert_all_islands_have_the_same(nodes)


def assert_all_islands_have_the_same(nodes: InProcess) -> None:
    buckets = [generation.stage.buckets for generation in nodes.generations.values()]
    for index in set().union(*buckets):
        first, *others = (of[index] for of in buckets if index in of)
        assert all(torch.equal(first.parameters, other.parameters) for other in others)
        assert first.momentum is not None
        assert all(torch.equal(first.momentum, other.shared[1]) for other in others)
        assert {other.digests()[1] for other in others} <= {first.digests()[1]}


def test_islands_try_outer_steps_on_held_out_samples_and_then_apply_whichever_is_chosen(run: Run) -> None:
    """Trying changes nothing that is trained: each loss is that of one process, which tries nothing."""
    run.network.exchange, run.train.outer_rate, run.train.outer_momentum = "off", 0.0, 0.0
    plan, data = joined([ALONE, PIPELINE, REPLICAS], 1), load_data(run)
    choices = itertools.cycle([OuterStep(0.7, 0.9), OuterStep(1.0, 0.0), OuterStep(1.0, 0.65)])
    chosen, expected = OuterStep(1.0, 0.0), dict[int, list[list[float]]]()

    def outer(step: int, under: Callable[[OuterStep], Any]) -> OuterStep:
        models = [under(each) for each in OUTER_STEPS]
        for island, numbers in looked_at(plan).items():
            of_island = [[held_out_loss_of(run, data, model, step + number) for number in numbers] for model in models]
            expected[island] = of_island
        return chosen

    alone = losses_of_islands(run, partial(shares, plan), EVENLY.exchanges, outer=outer)
    with started(run, plan) as nodes:
        for step in range(1, run.train.steps + 1):
            exchanges = EVENLY.exchanges(step)
            nodes.look_at, chosen = (OUTER_STEPS, next(choices)) if exchanges else ((), chosen)
            nodes.outer = chosen
            before = {name: state_of(each) for name, each in nodes.generations.items()}
            done = nodes.train_unfinished()
            if exchanges:
                assert all(state_of(each) == before[name] for name, each in nodes.generations.items())
            nodes.commit(done)
            loss = next(alone)
            if not exchanges:
                outcomes = [outcome for outcome, _ in done.values()]
                told = sum(each.loss_sum for each in outcomes) / sum(each.samples for each in outcomes)
                assert told == pytest.approx(loss, rel=1e-9, abs=0)
                continue
            for name, end in (("a", 0), ("c", 1), ("f", 4)):
                due = [each for of_step in expected[end] for each in of_step]
                assert done[name][0].looked == pytest.approx(due, rel=1e-9, abs=0)
            assert not done["b"][0].looked, "it has no last stage"
            assert_all_islands_have_the_same(nodes)


def test_an_island_that_begins_within_a_round_is_a_copy_with_anothers_moments_and_counts_by_what_it_trains(
    run: Run,
) -> None:
    run.network.exchange = "off"
    before = joined([island(0, (0, 5), [["a"]], [4]), island(1, (0, 2, 5), [["b"], ["c"]], [6])], 1)
    after = joined([ALONE, PIPELINE, island(4, (0, 3, 5), [["d"], ["e"]], [3])], 2)
    counted = Counted(2, ((0, 8), (1, 12)))
    alone = losses_of_islands(
        run,
        lambda step: shares(before if step <= 2 else after, step),
        EVENLY.exchanges,
        moments=lambda step: {4: 1} if step == 3 else {},
    )
    with started(run, before) as nodes:
        for step in range(1, 2 * (ROUNDS + 1)):
            if step == 3:
                nodes.begin_islands(replace(after, rounds=EVENLY, counted=counted), of=1)
            loss, expected = nodes.train(), next(alone)
            assert not step % (ROUNDS + 1) or loss == pytest.approx(expected, rel=1e-9, abs=0)
        assert nodes.plan.weights(ROUNDS + 1) == {0: 10 / 30, 1: 17 / 30, 4: 3 / 30}


def state_of(generation: Generation) -> list[bytes]:
    return [digest for bucket in generation.stage.buckets.values() for digest in bucket.digests()]


def test_islands_that_train_with_muon_are_copies_that_do(run: Run) -> None:
    run.network.exchange, run.train.optimizer = "off", MUON
    plan = joined([ALONE, PIPELINE, REPLICAS], 1)
    alone = losses_of_islands(run, partial(shares, plan), EVENLY.exchanges)
    with started(run, plan) as nodes:
        for step in range(1, 2 * (ROUNDS + 1)):
            loss, expected = nodes.train(), next(alone)
            assert not step % (ROUNDS + 1) or loss == pytest.approx(expected, rel=1e-9, abs=0)


def test_each_island_trains_the_mean_over_its_own_learnt_tokens_and_a_steps_loss_is_that_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = unequal_run(tmp_path, stages=[6], steps=2 * (ROUNDS + 1)).replace("stages = [6]\n", "")
    (tmp_path / "run.toml").write_text(text)
    run, plan = read_run_file(tmp_path / "run.toml").message("test"), joined([ALONE, PIPELINE, REPLICAS], 1)
    run.network.exchange = "off"
    alone = losses_of_islands(run, partial(shares, plan), EVENLY.exchanges)
    with started(run, plan) as nodes:
        for step in range(1, run.train.steps + 1):
            loss, expected = nodes.train(), next(alone)
            assert not step % (ROUNDS + 1) or loss == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.soak
def test_an_exchange_after_each_step_of_plain_sgd_is_synchronous_sgd(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the islands' changes, each with its share, is then the step of the whole batch."""

    def sgd(_train: Run.Train, _step: int, terms: Terms, bucket: Bucket, gradients: torch.Tensor, _: object) -> None:
        bucket.parameters.sub_(terms.learning_rate * gradients)

    monkeypatch.setattr("dtfm.node.training.generation.inner_step", sgd)
    run.network.exchange, run.train.schedule = "off", CONSTANT
    run.train.warmup_steps, run.train.learning_rate = 1, 0.1
    run.train.outer_rate, run.train.outer_momentum = 1.0, 0.0
    islands, one = joined([ALONE, PIPELINE, REPLICAS], 1), island(0, (0, 5), [["a"]], [10])
    with started(run, islands, spread(1, 10)) as nodes, started(run, one, NO_ROUNDS) as alone:
        losses = [alone.train() for _ in range(5)]
        assert losses[4] < losses[0] - 0.1
        for expected in losses:
            assert nodes.train() == pytest.approx(expected, rel=1e-12, abs=0)
            nodes.train()


def test_an_exchange_that_is_given_up_leaves_the_islands_as_they_were(run: Run) -> None:
    plan = joined([ALONE, PIPELINE, REPLICAS], 1)
    alone = losses_of_islands(run, partial(shares, plan), EVENLY.exchanges)
    with started(run, plan) as nodes:
        for _ in range(ROUNDS):
            nodes.train()
        nodes.train(commit=False)
        nodes.go_on(replace(nodes.plan, generation=2))
        nodes.train()
        assert nodes.train() == pytest.approx([*itertools.islice(alone, ROUNDS + 2)][-1], rel=1e-9, abs=0)


@pytest.mark.parametrize("codec", [Codec.TOP64, pytest.param(Codec.TOPK, marks=pytest.mark.soak)])
def test_what_a_sparse_exchange_leaves_out_comes_in_the_next(run: Run, codec: Codec) -> None:
    """The exchange's changes, and the changes that all messages left out, add up to the islands' changes, and most of the
    earlier leftovers. Of an island, one holder sends."""
    run.network.exchange, run.train.outer_rate, run.train.outer_momentum = codec.name.lower(), 1.0, 0.0
    plan = joined([ALONE, PIPELINE, REPLICAS], 1)
    with started(run, plan) as nodes:
        for _ in range(2):
            for _ in range(ROUNDS):
                nodes.train()
            before, learnt = dict[int, torch.Tensor](), dict[int, dict[int, torch.Tensor]]()
            for generation in nodes.generations.values():
                for index, bucket in generation.stage.buckets.items():
                    before[index] = bucket.shared[0].clone()
                    share = generation.placement.share_in_exchange(index, codec, nodes.step + 1)
                    change = (before[index] - bucket.parameters) * share
                    learnt.setdefault(index, {})[generation.placement.island] = change
            carried = left_out(nodes)
            nodes.train()
            for index, of_islands in learnt.items():
                whole = torch.stack([*of_islands.values()]).sum(0) + KEPT * carried.get(index, torch.zeros(1))
                after = [
                    g.stage.buckets[index].parameters for g in nodes.generations.values() if index in g.stage.buckets
                ]
                assert all(torch.equal(after[0], other) for other in after)
                changed = before[index] - after[0]
                torch.testing.assert_close(changed + left_out(nodes)[index], whole, rtol=0, atol=1e-7)
                assert not torch.allclose(changed, whole, rtol=0, atol=1e-5)


def left_out(nodes: InProcess) -> dict[int, torch.Tensor]:
    """By bucket, by all together."""
    found = dict[int, torch.Tensor]()
    for generation in nodes.generations.values():
        for index, residual in generation.exchanger.carried.items():
            found[index] = found.get(index, 0.0) + residual
    return found


@pytest.mark.soak
def test_what_a_sparse_exchange_leaves_out_outlives_a_change_of_plan_but_not_an_exchange_given_up(run: Run) -> None:
    run.network.exchange = "topk"
    plan = joined([ALONE, PIPELINE, REPLICAS], 1)
    with started(run, plan) as nodes:
        for _ in range(ROUNDS + 1):
            nodes.train()
        carried = left_out(nodes)
        assert all(residual.count_nonzero() for residual in carried.values())
        nodes.go_on(replace(nodes.plan, generation=2))
        for _ in range(ROUNDS):
            nodes.train()
        nodes.train(commit=False)
        assert all(torch.equal(carried[index], residual) for index, residual in left_out(nodes).items())


@pytest.mark.soak
def test_a_single_island_applies_all_that_it_has_learnt_whatever_the_codec(run: Run) -> None:
    run.network.exchange, run.train.outer_rate, run.train.outer_momentum = "topk", 1.0, 0.0
    plan = island(0, (0, 3, 5), [["d", "e"], ["f"]], [6, 4])
    alone = losses_of_islands(run, partial(shares, plan), EVENLY.exchanges)
    with started(run, plan) as nodes:
        for step in range(1, run.train.steps + 1):
            loss, expected = nodes.train(), next(alone)
            assert not step % (ROUNDS + 1) or loss == pytest.approx(expected, rel=1e-9, abs=0)
