"""A generation's nodes together, without sockets, over several commits."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
import torch
from transformers.loss.loss_utils import fixed_cross_entropy

from dtfm.kernels.codec import Codec
from dtfm.node.data.load import load_data
from dtfm.node.host.trace import Activity, Span, forget, listen
from dtfm.node.training.step.progress import Progress
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan, Takeover, from_routes
from tests.cluster.plain import adamw_of, batch, update, whole_model
from tests.cluster.runs import CORPUS, GPT2, held_out_losses_alone, losses_alone, run_file
from tests.node.in_process import InProcess, even_plan, nodes_of
from tests.tokenizer import make_tokenizer
from tests.unequal import unequal_run

LAYERS, MICRO_BATCHES = 6, 10


@pytest.fixture
def text() -> str:
    return run_file(stages=[2, 2], steps=4)


@pytest.fixture
def memory() -> int:
    """The memory of each node, in bytes."""
    return 1 << 30


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def nodes(text: str, memory: int) -> Iterator[InProcess]:
    """Two stages of two replicas."""
    with nodes_of(text, memory=memory) as nodes:
        assert nodes.plan == even_plan(LAYERS, 2, 2, MICRO_BATCHES)
        yield nodes


def without_n1() -> Plan:
    """The plan of ``nodes`` with n1's part given to n0."""
    plan = even_plan(LAYERS, 2, 2, MICRO_BATCHES)
    first = replace(plan.stages[0], replicas=("n0",), loads=(MICRO_BATCHES,))
    takeover = Takeover(0, "n1", 1, (("n0", MICRO_BATCHES // 2),))
    return replace(plan, generation=2, stages=(first, plan.stages[1]), takeovers=(takeover,))


def first_stage_swapped() -> Plan:
    """The plan of ``nodes`` with n0 and n1 in each other's seats."""
    first, last = even_plan(LAYERS, 2, 2, MICRO_BATCHES).stages
    routes = [(("n1", "n2"), MICRO_BATCHES // 2), (("n0", "n3"), MICRO_BATCHES // 2)]
    return from_routes(2, (replace(first, replicas=("n1", "n0")), last), routes)


def digests(nodes: InProcess) -> list[list[bytes]]:
    stages = [generation.stage for generation in nodes.generations.values()]
    return [[bucket.digests()[0] for bucket in stage.buckets.values()] for stage in stages]


CONVNET = """
[model]
family = "module"
module = "tests.convnet:convnet"
"""


def test_nodes_train_a_convolutional_network_as_one_process_does(tmp_path: Path) -> None:
    text = run_file(model=CONVNET, stages=[1, 1, 1], steps=4, source="module:tests.convnet:images")
    with nodes_of(text, 3, 1, allowed_modules=("tests.convnet",)) as nodes:
        losses = [nodes.train() for _ in range(4)]
    assert losses == pytest.approx(losses_alone(tmp_path / "run.toml", ("tests.convnet",)), rel=1e-9, abs=0)


def losses_of_a_trainer(run: Run, steps: int) -> Iterator[float]:
    """The losses of a plain loop that accumulates gradients over micro-batches as transformers' Trainer does: the loss of each is
    the sum over its labels, divided by the number of learnt labels of the whole step."""
    data = load_data(run)
    module = whole_model(run, data, ()).double()
    optimizer, of_step = adamw_of(run, module), run.train.global_batch // run.train.micro_batch
    for step in range(1, steps + 1):
        batches = [batch(run, data, number) for number in range((step - 1) * of_step, step * of_step)]
        learnt = torch.stack([(labels != -100).sum() for _, labels in batches]).sum()
        loss = 0.0
        for inputs, labels in batches:
            logits = module(inputs).logits
            part = fixed_cross_entropy(logits.flatten(0, 1), labels.flatten(), num_items_in_batch=learnt)
            torch.autograd.backward(part)
            loss += part.item()
        yield loss
        update(run, module, optimizer, step)


@pytest.mark.parametrize(
    "stages", [[2, 2], *(pytest.param(stages, marks=pytest.mark.soak) for stages in ([1], [1, 1, 1]))]
)
def test_each_learnt_token_of_a_step_counts_alike_as_in_transformers_trainer(tmp_path: Path, stages: list[int]) -> None:
    """With answers of one word and of hundreds. The held-out loss is the mean over learnt tokens too."""
    text, held_out = unequal_run(tmp_path, stages=stages, steps=4), list[float]()
    with nodes_of(text, len(stages), stages[0]) as nodes:
        losses = []
        for _ in range(4):
            losses.append(nodes.train())
            held_out.append(nodes.evaluate())
    run = read_run_file(tmp_path / "run.toml").message("any")
    assert losses == pytest.approx([*losses_of_a_trainer(run, 4)], rel=1e-9, abs=0)
    assert losses == pytest.approx(losses_alone(tmp_path / "run.toml"), rel=1e-9, abs=0)
    assert held_out == pytest.approx(held_out_losses_alone(tmp_path / "run.toml", 4), rel=1e-9, abs=0)


def test_each_sample_counts_alike_where_the_run_file_says_so(tmp_path: Path) -> None:
    with nodes_of(unequal_run(tmp_path, stages=[2, 2], steps=4, loss_per="sample")) as nodes:
        losses = [nodes.train() for _ in range(4)]
    run = read_run_file(tmp_path / "run.toml").message("any")
    assert losses == pytest.approx(losses_alone(tmp_path / "run.toml"), rel=1e-9, abs=0)
    assert losses != pytest.approx([*losses_of_a_trainer(run, 4)], rel=1e-3, abs=0)


def test_samples_of_several_sources_are_those_of_one_process(tmp_path: Path) -> None:
    """Also where a step goes on after an interruption."""
    records = [{"body": f"{number} is a number, and so is {number + 1}. "} for number in range(400)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = run_file(model=GPT2, stages=[2, 2], steps=3).replace(f'source = "{CORPUS}"\n', "")
    text += f'[[data.sources]]\nsource = "{CORPUS}"\n[[data.sources]]\nsource = "b.jsonl"\ntext_field = "body"\nweight = 2\n'
    with nodes_of(text) as nodes:
        losses = [nodes.train()]
        nodes.interrupt(8)
        nodes.go_on(replace(nodes.plan, generation=2))
        losses += [nodes.train() for _ in range(2)]
    assert losses == pytest.approx(losses_alone(tmp_path / "run.toml"), rel=1e-9, abs=0)


def test_a_step_that_was_interrupted_counts_each_token_alike(tmp_path: Path) -> None:
    with nodes_of(unequal_run(tmp_path, stages=[2, 2], steps=2)) as nodes:
        nodes.interrupt(8)
        nodes.go_on(replace(nodes.plan, generation=2))
        losses = [nodes.train() for _ in range(2)]
    assert losses == pytest.approx(losses_alone(tmp_path / "run.toml"), rel=1e-9, abs=0)


def test_documents_that_share_a_sample_are_learnt_each_by_itself(tmp_path: Path) -> None:
    """A stage in the middle knows their borders too; so do evaluations."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer", "so many words, and so few letters")
    documents = [{"text": "so many words, and so few letters " * (n % 5)} for n in range(300)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    mixed = run_file(model=GPT2, stages=[1, 1, 1], steps=3, source=str(tmp_path / "documents.jsonl"))
    mixed = mixed.replace("[data]\n", f'[data]\ntokenizer = "{tokenizer}"\n')
    path = tmp_path / "run.toml"
    with nodes_of(mixed.replace("[data]\n", "[data]\nisolate_documents = true\n"), 3, 1) as nodes:
        began = nodes.evaluate()
        losses = [nodes.train() for _ in range(3)]
    assert losses == pytest.approx(losses_alone(path), rel=1e-9, abs=0)
    with nodes_of(mixed, 3, 1) as nodes:
        assert losses != pytest.approx(losses_alone(path), rel=1e-4, abs=0)
        assert nodes.evaluate() != pytest.approx(began, rel=1e-6)


HOST, LAYER = Keeping(optimizer_state=OptimizerState.HOST), Keeping(Checkpointing.LAYER)


@pytest.mark.parametrize("precision", ["fp64", pytest.param("bf16", marks=pytest.mark.soak)])
def test_however_replicas_keep_their_memory_they_train_the_same_and_what_one_process_does(
    tmp_path: Path, precision: str
) -> None:
    text, losses, ends = run_file(stages=[2, 2], steps=4, precision=precision), [], []
    for keeping in [(Keeping(),), (HOST, LAYER)]:
        with nodes_of(text, 2, 2, *keeping) as nodes:
            losses.append([nodes.train() for _ in range(4)])
            ends.append(digests(nodes))
    assert losses[0] == losses[1]
    assert ends[0] == ends[1]
    assert ends[0][0] == ends[0][1]
    tolerance = 1e-9 if precision == "fp64" else 0.02
    assert losses[0] == pytest.approx(losses_alone(tmp_path / "run.toml"), rel=tolerance, abs=0)


@pytest.mark.parametrize(
    "sent", [1, 28, *(pytest.param(sent, marks=pytest.mark.soak) for sent in (4, 7, 10, 16, 22, 34, 40, 45, 60))]
)
def test_an_interrupted_step_goes_on_and_only_what_the_lost_node_did_is_done_again(
    tmp_path: Path, nodes: InProcess, sent: int
) -> None:
    backwards: Counter[int] = Counter()

    def count(span: Span) -> None:
        if span.activity is Activity.BACKWARD and span.ended is None:
            backwards[span.step] += 1

    losses = [nodes.train()]
    listen(count)
    try:
        nodes.interrupt(sent)
        lost = len(nodes.generations["n1"].progress.finished)
        nodes.go_on(without_n1())
        losses += [nodes.train(), nodes.train()]
    finally:
        forget(count)
    assert losses == pytest.approx(losses_alone(tmp_path / "run.toml", steps=3), rel=1e-9, abs=0)
    assert backwards == {2: 2 * MICRO_BATCHES + lost, 3: 2 * MICRO_BATCHES}


@pytest.mark.parametrize("sent", [28, *(pytest.param(sent, marks=pytest.mark.soak) for sent in (1, 45))])
def test_wherever_a_step_is_interrupted_the_stage_of_a_node_that_is_idle_now_is_freed_at_once(
    nodes: InProcess, sent: int
) -> None:
    nodes.train()
    gc.collect()
    gc.disable()
    try:
        nodes.interrupt(sent)
        stage = weakref.ref(nodes.generations["n1"].stage)
        nodes.go_on(without_n1())
        assert stage() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("text", [run_file(stages=[2, 2], steps=4, precision="bf16", compression="i8b256")])
def test_what_may_be_sent_again_is_kept_as_it_is_sent_and_counts_as_that(nodes: InProcess) -> None:
    """Also tensors that are being sent when the step is interrupted: no device tensor is kept for them."""
    nodes.interrupt(4)
    for progress in (generation.progress for generation in nodes.generations.values()):
        sent = [sent.result() for sent in progress.sent.values()]
        assert all(encoded.codec is Codec.I8B256 for encoded in sent)
        assert sum(progress._kept.values()) == sum(len(encoded.data) for encoded in sent)
    assert any(generation.progress.sent for generation in nodes.generations.values())


def test_a_micro_batch_that_went_to_another_node_and_came_back_is_sent_once(tmp_path: Path, nodes: InProcess) -> None:
    nodes.interrupt(1)
    assert any(nodes.generations[node].progress.outputs for node in ("n0", "n1"))
    nodes.go_on(first_stage_swapped())
    nodes.go_on(replace(even_plan(LAYERS, 2, 2, MICRO_BATCHES), generation=3))
    assert [nodes.train(), nodes.train()] == pytest.approx(
        losses_alone(tmp_path / "run.toml", steps=2), rel=1e-9, abs=0
    )


def test_a_changed_link_gets_another_codec_between_two_steps(text: str) -> None:
    with nodes_of(text.replace('compression = "off"', 'compression = "auto"'), flops=1e9) as nodes:
        n0 = nodes.generations["n0"]
        nodes.train()
        before = n0.codecs
        assert before.all == {Codec.OFF}
        assert not n0.links_changed({"n2": 0.9e9})
        assert n0.links_changed({"n2": 1.0})
        assert (n0.codecs.activations["n2"], n0.codecs.reduction) == (Codec.I8B256, Codec.OFF)
        assert isfinite(nodes.train())
        assert n0.links_changed({"n2": 1e9})
        assert n0.codecs == before


@pytest.mark.parametrize(("memory", "kept"), [(1 << 30, True), (1 << 20, False)])
def test_gradients_of_before_the_reduction_are_kept_where_there_is_room_for_all(
    nodes: InProcess, memory: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    keep = Progress.keep_unreduced

    def keep_and_count(progress: Progress, bucket: int, gradients: torch.Tensor) -> None:
        copied.append(bucket)
        keep(progress, bucket, gradients)

    monkeypatch.setattr(Progress, "keep_unreduced", keep_and_count)
    nodes.train(commit=False)
    assert bool(copied) == kept
    assert all(generation.progress.fits(generation.placement) == kept for generation in nodes.generations.values())
