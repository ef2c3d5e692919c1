"""On a GPU streams do not wait for each other by themselves: each use of memory waits for the one before it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtfm.kernels.transfer import arriving
from dtfm.node.data.load import load_data
from dtfm.node.host.cuda_streams import after, wait_until_computed
from dtfm.node.state.digests import StateDigests
from dtfm.node.state.images import Images
from dtfm.node.training.reduction import reducer
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.memory import Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan, Stage, joined
from dtfm.scheduler.model.rounds import spread
from tests.cluster.runs import run_file, write_corpus
from tests.node.in_process import CPU, InProcess, nodes_of
from tests.node.load_once import load_once
from tests.node.pretended_gpu import PretendedGpus, Stream, pretended_gpus
from tests.node.training.audits.auditors import Auditors, errors

GPUS = [torch.device("cuda", number) for number in range(4)]
"""One for each node, as each has a process of its own."""

ON_HOST = Keeping(optimizer_state=OptimizerState.HOST)


def read(nodes: InProcess, name: str) -> None:
    """As donations and votes do, beside training."""
    digests, images, buckets = StateDigests(), Images(), nodes.generations[name].stage.buckets.values()
    digests.begin(nodes.step, buckets)
    pieces = [*itertools.chain.from_iterable(images.read(bucket) for bucket in buckets)]
    assert len(pieces) == len(digests.of(buckets))
    digests.close()


def train(devices: Sequence[torch.device], text: str, *keeping: Keeping) -> list[float]:
    """Two steps; the second is interrupted while the state is read. Returns the losses."""
    losses = list[float]()
    with nodes_of(text, 2, 2, *keeping, devices=devices) as nodes, ThreadPoolExecutor() as pool:
        losses += [nodes.train(), nodes.evaluate()]
        reading = [pool.submit(read, nodes, name) for name in nodes.generations]
        nodes.interrupt(5)
        nodes.go_on(nodes.plan)
        for each in reading:
            each.result()
        return [*losses, nodes.train(), nodes.evaluate()]


def text_of(precision: str, reduction: str, more: str = "") -> str:
    text = run_file(stages=[2, 2], steps=4, precision=precision, compression="i8b256") + more
    text = text.replace("global_batch = 20", "global_batch = 8")  # 20 would take twice as long
    return text.replace("[network]\n", f'[network]\nreduction = "{reduction}"\n')


@pytest.mark.parametrize(
    ("precision", "reduction", "more", "keeping"),
    [
        ("bf16", "i8b256", '[trust]\nmode = "open"\n', (ON_HOST, Keeping())),
        pytest.param("fp32", "off", "", (), marks=pytest.mark.soak),
        pytest.param("bf16", "auto", "", (), marks=pytest.mark.soak),
    ],
)
def test_nodes_wait_for_what_they_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    reduction: str,
    more: str,
    keeping: tuple[Keeping, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = text_of(precision, reduction, more)
    expected = train([CPU], text, *keeping)
    with pretended_gpus() as gpus:
        assert train(GPUS, text, *keeping) == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2, abs=0)
    assert gpus.accesses > 5_000
    assert not gpus.errors


@pytest.mark.soak
def test_auditors_wait_for_what_they_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pretended_gpus() as gpus,
        nodes_of(text_of("bf16", "i8b256", "[trust]\naudit_rate = 1\n"), devices=GPUS) as nodes,
    ):
        step = Auditors(nodes)
        found = [step.answer("n1", step.asked("n0", bucket=1)), step.answer("n3", step.asked("n2"))]
    assert all(0 <= max(errors(answer)) < 0.01 for answer in found)
    assert not gpus.errors


@pytest.mark.soak
@pytest.mark.parametrize("codec", ["i4b64", "topk"])
def test_islands_wait_for_what_they_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    text = text_of("fp32", "off").replace("steps = 4", "steps = 6").replace("stages = [2, 2]\n", "")
    (tmp_path / "run.toml").write_text(text)
    run = read_run_file(tmp_path / "run.toml").message("test")
    run.network.exchange = codec
    data = load_data(run)
    model = load_once(run.model, data.sample)
    islands = [
        Plan(1, (Stage((0, len(model.layers)), (node,), (2,), (), island=n),), ()) for n, node in enumerate("ab")
    ]
    with (
        pretended_gpus() as gpus,
        InProcess(
            run, replace(joined(islands, 1), rounds=spread(2, 6)), model, data, bandwidth=1e9, flops=1e12, devices=GPUS
        ) as nodes,
    ):
        losses = [nodes.train() for _ in range(6)]
    assert losses[4] < losses[0]
    assert not gpus.errors


@pytest.mark.soak
@pytest.mark.parametrize(
    ("missing", "shows"),
    [
        ("a stream waits for an event", "reducer.py"),
        ("the host waits for an event", "numpy in"),
        ("a reduction waits for its end", "optimizer.py"),
    ],
)
def test_a_wait_that_is_missing_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, shows: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pretended_gpus() as gpus:
        where, name = {
            "a stream waits for an event": (gpus.Stream, "wait_event"),
            "the host waits for an event": (gpus.Event, "synchronize"),
            "a reduction waits for its end": (reducer, "wait_beside"),
        }[missing]
        monkeypatch.setattr(where, name, lambda *_: None)
        train(GPUS, text_of("fp32", "off"))
    assert any(shows in error for error in gpus.errors)


# What these tests stand on


def read_beside(x: torch.Tensor, gpus: PretendedGpus) -> Stream:
    """On the stream that it returns, which does not wait for any other."""
    stream = gpus.Stream(x.device)
    with gpus.on(stream):
        x.sum()
    return stream


def test_what_one_stream_writes_and_another_reads_must_be_ordered() -> None:
    with pretended_gpus() as gpus:
        x = torch.zeros(10, device=GPUS[0])
        with after(x.device)():
            x.sum()
        assert not gpus.errors
        read_beside(x, gpus)
        assert list(gpus.errors) == ["sum in a test does not wait for zeros in a test"]


def test_the_host_must_wait_for_what_it_reads() -> None:
    with pretended_gpus() as gpus:
        came = arriving(torch.zeros(10, device=GPUS[0]))
        came().numpy()
        assert not gpus.errors
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(gpus.Event, "synchronize", lambda _: None)
        arriving(torch.zeros(10, device=GPUS[0]))().numpy()
        monkeypatch.undo()
        assert list(gpus.errors) == ["numpy in a test does not wait for copy_ in transfer.py, arriving"]


def test_memory_must_not_be_freed_while_another_stream_reads_it() -> None:
    with pretended_gpus() as gpus:
        for waits in (True, False):
            x = torch.zeros(10, device=GPUS[0])
            wait_until_computed(x.device)
            stream = read_beside(x, gpus)
            if waits:
                stream.record_event().synchronize()
            del x
            gpus.free()
            assert list(gpus.errors) == ([] if waits else ["sum in a test may use memory after it is freed"])


def test_tensors_of_different_devices_are_not_added() -> None:
    with pretended_gpus(), pytest.raises(RuntimeError, match="mixes devices"):
        torch.zeros(10, device=GPUS[0]) + torch.zeros(10, device=GPUS[1])
