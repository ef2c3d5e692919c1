"""Nodes on a GPU."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from dtfm.kernels.transfer import arriving
from dtfm.node.host.cuda_streams import DeviceWork, after
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.model.optimizer.optimizer import Terms, adamw
from dtfm.protos.plan_pb2 import Run
from tests.cluster.runs import losses_alone, run_file
from tests.node.in_process import nodes_of
from tests.node.training.audits.auditors import Auditors, errors
from tests.node.training.test_reads import READS, place_of_read

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-6), ("fp32", 1e-3)])
def test_nodes_on_a_gpu_train_what_one_process_on_a_cpu_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, tolerance: float
) -> None:
    monkeypatch.chdir(tmp_path)
    text = run_file(stages=[2, 2], steps=4, precision=precision)
    gpu = torch.device("cuda", 0)
    with nodes_of(text, devices=[gpu]) as nodes:
        losses = [nodes.train() for _ in range(4)]
    assert losses == pytest.approx(losses_alone(tmp_path / "run.toml"), rel=tolerance, abs=0)


@pytest.mark.parametrize("compression", ["off", "i8b256"])
def test_replicas_on_a_gpu_do_each_others_work_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = run_file(stages=[2, 2], steps=4, precision="bf16", compression=compression)
    text = f"{text}[trust]\naudit_rate = 1\n"
    with nodes_of(text, devices=[torch.device("cuda", 0)]) as nodes:
        step = Auditors(nodes)
        activations, _, addends, _ = errors(step.answer("n1", step.asked("n0", bucket=1)))
        _, gradients, _, losses = errors(step.answer("n3", step.asked("n2")))
    assert 0 <= max(activations, gradients, addends, losses) < 0.01


def test_work_on_a_gpu_is_timed_and_only_so_much_of_it_is_ahead() -> None:
    gpu = torch.device("cuda", 0)
    work, cycles = DeviceWork(gpu), 100_000_000
    for _ in range(3):
        with work.piece():
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    assert work.seconds == 0.0
    work.wait(but=1)
    two = work.seconds
    work.wait()
    assert 0 < two < work.seconds
    assert work.seconds == pytest.approx(1.5 * two, rel=0.2)


def test_what_waits_for_a_tensor_does_not_wait_for_what_comes_after_it() -> None:
    x = torch.ones(1000, device="cuda:0")
    ready = after(x.device)
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    busy = torch.cuda.current_stream(x.device)
    for _ in range(2):
        with ready():
            assert x.cpu().eq(1).all()
    assert not busy.query()


def test_who_reads_a_number_does_not_wait_for_what_is_queued_after_it() -> None:
    x = torch.ones(1000, device="cuda:0")
    total = arriving(x.sum())
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    assert total().item() == 1000
    assert not torch.cuda.current_stream(x.device).query()


def test_a_step_waits_for_the_gpu_only_where_it_reads_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As test_reads.py counts them without a GPU. A copy to memory that is not pinned would wait, too."""
    monkeypatch.chdir(tmp_path)
    text = run_file(stages=[2, 2], steps=4, precision="bf16", compression="i8b256")
    waits = Counter[str]()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "synchronizing" in str(message) and (place := place_of_read()) is not None:
            waits[place] += 1

    with nodes_of(text, devices=[torch.device("cuda", 0)]) as nodes:
        nodes.train()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", note)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                nodes.train()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert waits == READS


@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
def test_an_update_has_the_same_bits_wherever_the_state_is(home: str) -> None:
    """Replicas of a stage keep it in different places."""
    spec, gpu = BucketSpec(0, (0,), (("matrix", (1000, 3001)), ("vector", (77,)))), torch.device("cuda", 0)
    here, there = Bucket(spec, torch.device("cpu"), torch.float32), Bucket(spec, gpu, torch.float32, torch.device(home))
    some = torch.Generator().manual_seed(0)
    for mine, other in zip(here.state, there.state, strict=True):
        other.copy_(mine.uniform_(generator=some))
    train, terms = Run.Train(beta1=0.9, beta2=0.95, epsilon=1e-8), Terms(0.4, 1e-3, 0.1)
    for step in range(1, 4):
        gradients = torch.randn(spec.size, generator=some)
        there.gradients.copy_(gradients)
        adamw(train, step, terms, here, gradients)
        adamw(train, step, terms, there, there.gradients)
        assert here.digests()[0] == there.digests()[0]


@pytest.mark.parametrize(
    ("does", "is_lost"),
    [
        ("x[torch.tensor([100]).cuda()]", True),
        ("torch.empty(1 << 45, device='cuda:0')", False),
        ("torch.empty(1 << 40, pin_memory=True)", False),
    ],
    ids=["an index out of range", "too little memory", "too little memory of the host"],
)
def test_a_device_that_is_lost_is_told_from_one_without_memory(does: str, is_lost: bool) -> None:
    """In a process of its own, which is of no use afterwards."""
    program = f"""
import torch
from dtfm.node.training.failure import is_device_lost
x = torch.zeros(10, device="cuda:0")
try:
    {does}
    torch.cuda.synchronize()
except Exception as error:
    print(is_device_lost(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(is_lost)], done.stderr
