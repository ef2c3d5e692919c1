"""What a node's training thread does with the plans that it gets."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from blake3 import blake3

from dtfm.coordinator.service.checkpoint.checkpoint_place import mark
from dtfm.node.data.allowed import Allowed
from dtfm.node.data.dataset import TokenWindows
from dtfm.node.model.bucket import Bucket
from dtfm.node.network.dialling import Lost
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import Loading, file_name
from dtfm.node.state.snapshots import Snapshots
from dtfm.node.state.state_store import StateStore
from dtfm.node.training import adoption, trainer
from dtfm.node.training.adoption import set_up
from dtfm.node.training.equipment import Equipment
from dtfm.node.training.generation import Generation
from dtfm.node.training.preparing import preparation
from dtfm.node.training.preparing.preparation import Preparation
from dtfm.node.training.preparing.timing import Timing
from dtfm.node.training.trainer import Trainer
from dtfm.node.transport.receiver import Closed, Receiver
from dtfm.node.transport.sender import Sender
from dtfm.protos.control_pb2 import (
    Assignment,
    Begin,
    Commit,
    Device,
    NodeMessage,
    Peer,
    PlanFailed,
    Prepared,
    SnapshotSource,
    StepProblem,
)
from dtfm.protos.plan_pb2 import BF16, FP32, Run
from dtfm.protos.run_file.run_file import read_run_file
from dtfm.scheduler.model.plan import Plan, Stage
from tests.cluster.runs import run_file, write_corpus
from tests.node.assignments import assigned
from tests.node.dialling import dialler
from tests.node.in_process import even_plan
from tests.node.load_once import load_once

LAYERS, MICRO_BATCHES = 6, 10
UNCLIPPED = (Commit.Clip(past_last_layer=LAYERS, factor=1.0),)
WITHOUT_N0 = Plan(1, (Stage((0, LAYERS), ("n1",), (MICRO_BATCHES,)),), ())
LEASE = 20.0
NOBODY = "127.0.0.1:1"


class Node:
    """A trainer that has loaded the run. ``reports`` are its messages, ``receivers`` where it has frames delivered to."""

    def __init__(self, folder: Path) -> None:
        self.reports: asyncio.Queue[NodeMessage] = asyncio.Queue()
        self.receivers: asyncio.Queue[Receiver | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def report(message: NodeMessage) -> None:
            loop.call_soon_threadsafe(self.reports.put_nowait, message)

        self.equipment = Equipment(
            node="n0",
            device=torch.device("cpu"),
            hardware=Device(kind="cpu", memory_bytes=1 << 30, flops=1e12),
            sender=Sender("n0", lambda *failed: None),
            store=StateStore(),
            tokens=folder / "tokens",
            frozen=folder / "frozen",
            snapshots=Snapshots(Disk(folder, "n0"), report),
        )
        self.trainer = Trainer(self.equipment, loop, report, lambda error: pytest.fail(str(error)))

    def adopt(self, plan: Plan) -> None:
        loop = asyncio.get_running_loop()

        def deliver_to(receiver: Receiver | None) -> None:
            loop.call_soon_threadsafe(self.receivers.put_nowait, receiver)

        peers = [Peer(node=name, candidates=[NOBODY]) for stage in plan.stages for name in stage.replicas]
        donors = [Assignment.Donors() for _ in range(LAYERS)]
        self.trainer.adopt(assigned(plan, donors=donors, peers=peers), deliver_to)


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    (tmp_path / "run.toml").write_text(run_file(stages=[1], steps=4, lease=LEASE))
    mark(f"{tmp_path}/checkpoints", "test")
    monkeypatch.setattr(preparation, "load_model", load_once)
    monkeypatch.setattr(preparation, "layer_flops", lambda *_: 1e9)
    node = Node(tmp_path / "snapshots")
    node.trainer.prepare(read_run_file(tmp_path / "run.toml").message("test"), dialler("n0"), Allowed(["/"]))
    assert (await node.reports.get()).prepared.flops == 1e9
    yield node
    await asyncio.to_thread(node.trainer.stop)
    node.equipment.snapshots.writer.close()
    await node.equipment.sender.close()


def stop(*_: object) -> None:
    raise Closed("this is enough")


async def test_a_node_that_is_welcomed_again_while_it_loads_says_what_the_run_is_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: Node
) -> None:
    before, now = (read_run_file(tmp_path / "run.toml").message("another") for _ in range(2))
    now.train.outer_rate = 0.5
    mark(f"{tmp_path}/checkpoints", "another")
    loading, welcomed = threading.Event(), threading.Event()

    def layer_flops(*_: object) -> float:
        loading.set()
        assert welcomed.wait(30)
        return 2e9

    monkeypatch.setattr(preparation, "layer_flops", layer_flops)
    node.trainer.prepare(before, dialler("n0"), Allowed(["/"]))
    assert await asyncio.to_thread(loading.wait, 30)
    node.trainer.prepare(now, dialler("n0"), Allowed(["/"]))
    welcomed.set()
    said = (await node.reports.get()).prepared
    node.trainer.prepare(now, dialler("n0"), Allowed(["/"]))
    assert (await node.reports.get()).prepared.layouts == said.layouts


async def test_a_node_is_prepared_when_nothing_is_left_to_compile_that_a_plan_may_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    (tmp_path / "run.toml").write_text(run_file(stages=[1], steps=4, storage="coordinator:"))
    loop, awaited, done = asyncio.get_running_loop(), asyncio.Event(), list[str]()

    async def compile_kernels(device: torch.device) -> None:
        await awaited.wait()
        done.append("compiled")

    @contextmanager
    def part(what: str) -> Iterator[None]:
        if what.startswith("compiling"):
            loop.call_soon_threadsafe(awaited.set)
        yield

    def layer_flops(*of: object) -> float:
        done.append("timed")
        return 1e9

    monkeypatch.setattr(preparation, "compile_kernels", compile_kernels)
    monkeypatch.setattr(preparation, "layer_flops", layer_flops)
    monkeypatch.setattr(preparation, "long_part", part)
    node = Node(tmp_path / "snapshots")
    node.trainer.prepare(read_run_file(tmp_path / "run.toml").message("test"), dialler("n0"), Allowed(["/"]))
    assert (await node.reports.get()).prepared.flops == 1e9
    # The device is timed when nothing else is going on.
    assert done == ["compiled", "timed"]
    await asyncio.to_thread(node.trainer.stop)
    node.equipment.snapshots.writer.close()
    await node.equipment.sender.close()


async def test_a_device_that_cannot_compute_in_the_runs_precision_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(_: torch.device) -> None:
        raise ValueError("the run computes in bf16")

    monkeypatch.setattr(preparation, "check_bf16", cannot)
    for precision, said in (("bf16", ["the run computes in bf16"]), ("fp32", [])):
        (tmp_path / "run.toml").write_text(run_file(stages=[1], steps=4, precision=precision, storage="coordinator:"))
        run = read_run_file(tmp_path / "run.toml").message("test")
        mistakes, node = list[str](), Node(tmp_path / "snapshots")
        monkeypatch.setattr(preparation, "compile_kernels", stop)
        node.trainer._fail = lambda error, said=mistakes: said.append(str(error))  # type: ignore[misc]
        node.trainer.prepare(run, dialler("n0"), Allowed(("/",)))
        await asyncio.to_thread(node.trainer.stop)
        node.equipment.snapshots.writer.close()
        await node.equipment.sender.close()
        assert mistakes == said


async def test_a_peer_that_was_lost_fails_the_step_of_its_own_generation_alone(node: Node) -> None:
    node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
    assert (await node.reports.get()).plan_ready.generation == 1
    node.trainer.failed(Lost("n1", "of the last plan"), 0)
    node.trainer.failed(Lost("n2", "of this one"), 1)
    told = (await node.reports.get()).step_failed
    assert (told.generation, told.step, told.problem, told.peer) == (1, 1, StepProblem.PEER_LOST, "n2")
    assert told.sentence == "n2: of this one"


async def test_what_a_node_computed_with_is_freed_with_the_plan_and_no_garbage_collector_is_waited_for(
    node: Node,
) -> None:
    node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
    frames_go_to = await node.receivers.get()  # as the peer server has it until the next plan is there
    assert (await node.reports.get()).plan_ready.generation == 1
    node.trainer.begin(Begin(generation=1, step=1))
    assert (await node.reports.get()).step_ready.step == 1
    assert node.trainer._generation is not None
    generation, stage = weakref.ref(node.trainer._generation), weakref.ref(node.trainer._generation.stage)
    gc.collect()
    gc.disable()
    try:
        node.adopt(replace(WITHOUT_N0, generation=2))
        assert await node.receivers.get() is None
        assert (generation(), stage()) == (None, None)
    finally:
        gc.enable()
    assert frames_go_to is not None


async def test_a_device_that_has_failed_ends_the_node_and_no_peer_or_plan_is_said_to_be_at_fault(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, failed = torch.AcceleratorError("CUDA error: an illegal memory access"), asyncio.Queue[Exception]()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(node.trainer, "_fail", lambda e: loop.call_soon_threadsafe(failed.put_nowait, e))
    with monkeypatch.context() as patch:
        patch.setattr(adoption, "set_up", mock.Mock(side_effect=lost))
        node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
        assert await failed.get() is lost
    node.adopt(replace(even_plan(LAYERS, 1, 1, MICRO_BATCHES), generation=2))
    assert (await node.reports.get()).plan_ready.generation == 2
    monkeypatch.setattr(Generation, "train", mock.Mock(side_effect=lost))
    node.trainer.begin(Begin(generation=2, step=1))
    assert await failed.get() is lost
    assert node.reports.empty()


@pytest.mark.parametrize("tries", [2, 3])
async def test_a_run_that_cannot_be_loaded_while_a_server_hiccups_is_loaded_again(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    monkeypatch.setattr(preparation, "PAUSES", (0.001,))
    hiccup, load, left = ValueError("data.source: hf:wiki cannot be loaded"), Preparation.load, tries - 1
    hiccup.__cause__ = ConnectionError("503")

    def hiccups(*arguments: Any) -> bool:
        nonlocal left
        left -= 1
        if left >= 0:
            raise hiccup
        return load(*arguments)

    loop, failed = asyncio.get_running_loop(), asyncio.Queue[Exception]()
    monkeypatch.setattr(node.trainer, "_fail", lambda e: loop.call_soon_threadsafe(failed.put_nowait, e))
    monkeypatch.setattr(Preparation, "load", hiccups)
    node.trainer.prepare(read_run_file(tmp_path / "run.toml").message("test"), dialler("n0"), Allowed(["/"]))
    if tries == 2:
        assert (await node.reports.get()).HasField("prepared")
    else:
        assert await failed.get() is hiccup


async def test_an_impossible_plan_is_refused_with_what_is_wrong(node: Node) -> None:
    node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES - 1))
    failed = (await node.reports.get()).plan_failed
    assert failed == PlanFailed(generation=1, problem="stage 0's loads add up to 9; a step has 10 micro-batches")
    node.adopt(replace(even_plan(LAYERS, 1, 1, MICRO_BATCHES), generation=2))
    assert (await node.reports.get()).plan_ready.generation == 2


@pytest.mark.parametrize("in_plan", [True, False])
async def test_a_node_says_at_once_that_it_lacks_state_that_others_are_to_get_from_it(
    node: Node, in_plan: bool
) -> None:
    plan = even_plan(LAYERS, 1, 1, MICRO_BATCHES) if in_plan else WITHOUT_N0
    donors = [Assignment.Donors(nodes=["n0", "n1"])] * 2 + [Assignment.Donors(nodes=["n1"])] * (LAYERS - 2)
    peers = [Peer(node="n1", candidates=[NOBODY])]
    node.trainer.adopt(assigned(plan, step=3, donors=donors, peers=peers), lambda _: None)
    async with asyncio.timeout(LEASE / 2):  # n1 is known to be out of reach only after a lease
        failed = (await node.reports.get()).plan_failed
    assert (failed.generation, list(failed.lost)) == (1, [0, 1])


async def test_a_plan_that_replaces_one_being_adopted_does_not_wait_for_that_ones_peers(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, alone = asyncio.get_running_loop(), replace(even_plan(LAYERS, 1, 1, MICRO_BATCHES), generation=2)

    async def replace_it() -> None:
        node.adopt(alone)

    def set_up_late(*arguments: Any) -> Generation:
        if node.trainer._newest == 1:
            asyncio.run_coroutine_threadsafe(replace_it(), loop).result(timeout=10)
        return set_up(*arguments)

    monkeypatch.setattr(adoption, "set_up", set_up_late)
    node.adopt(even_plan(LAYERS, 1, 2, MICRO_BATCHES))  # n1 cannot be reached, which is known after a lease
    async with asyncio.timeout(LEASE / 2):
        assert (await node.reports.get()).plan_ready.generation == 2


async def test_a_node_that_cannot_take_up_the_run_again_says_so_also_where_it_has_a_part_in_a_plan(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is welcomed again, and the run may no longer read where it wants to."""
    refused, loop, failed = ValueError("checkpoint.uri"), asyncio.get_running_loop(), asyncio.Queue[Exception]()
    monkeypatch.setattr(node.trainer, "_fail", lambda e: loop.call_soon_threadsafe(failed.put_nowait, e))
    node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
    assert (await node.reports.get()).plan_ready.generation == 1
    monkeypatch.setattr(Preparation, "load", mock.Mock(side_effect=refused))
    node.trainer.prepare(read_run_file(tmp_path / "run.toml").message("test"), dialler("n0"), Allowed(["/"]))
    assert await failed.get() is refused
    assert node.reports.empty()


@pytest.fixture
def data_comes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The samples are on this machine when it is set."""
    comes, hold = threading.Event(), TokenWindows.hold

    def late(data: TokenWindows) -> None:
        assert comes.wait(10)
        hold(data)

    monkeypatch.setattr(TokenWindows, "hold", late)
    yield comes
    comes.set()


async def test_a_node_takes_its_place_when_it_has_the_data(
    node: Node, data_comes: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_work = Trainer._await

    def it_comes_when_waited_for(of: Trainer, work: Coroutine[Any, Any, Any]) -> Any:
        if "_await_data" in str(work):
            data_comes.set()
        return wait_for_work(of, work)

    monkeypatch.setattr(Trainer, "_await", it_comes_when_waited_for)
    node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
    assert (await node.reports.get()).plan_ready.generation == 1
    assert data_comes.is_set()


async def test_a_plan_that_is_replaced_does_not_wait_for_its_data(node: Node, data_comes: threading.Event) -> None:
    node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
    node.adopt(replace(WITHOUT_N0, generation=2))
    assert await node.receivers.get() is None  # it is idle
    began = time.monotonic()
    await asyncio.to_thread(node.trainer.stop)
    assert time.monotonic() - began < trainer.STOP_SECONDS / 2
    assert not data_comes.is_set()


async def test_an_idle_node_gets_the_data_before_it_is_needed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    held, loop = asyncio.Event(), asyncio.get_running_loop()
    monkeypatch.setattr(TokenWindows, "hold", lambda _: loop.call_soon_threadsafe(held.set))
    node.adopt(WITHOUT_N0)
    assert await node.receivers.get() is None
    await held.wait()


async def test_an_idle_node_times_its_device_again_when_that_is_due_and_a_training_one_does_not(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "layer_flops", lambda *_: 3e9)
    node.adopt(WITHOUT_N0)
    assert await node.receivers.get() is None
    node.trainer.look_after_timing(0.0)  # it was timed just now
    monkeypatch.setattr(Timing, "is_due", lambda *_: True)
    node.trainer.look_after_timing(0.0)
    assert (await node.reports.get()).timed.flops == 3e9  # the only one
    assert node.trainer.hardware.flops == 3e9
    node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
    assert (await node.reports.get()).WhichOneof("message") == "plan_ready"
    node.trainer.look_after_timing(0.0)
    node.adopt(WITHOUT_N0)
    node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
    assert (await node.reports.get()).WhichOneof("message") == "plan_ready"


async def test_a_node_that_cannot_have_the_data_says_so_and_may_try_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: TokenWindows) -> None:
        raise ValueError("data.source: gone")

    with monkeypatch.context() as patched:
        patched.setattr(TokenWindows, "hold", fail)
        node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
        assert (await node.reports.get()).plan_failed == PlanFailed(generation=1, problem="data.source: gone")
    node.adopt(replace(even_plan(LAYERS, 1, 1, MICRO_BATCHES), generation=2))
    assert (await node.reports.get()).plan_ready.generation == 2


async def test_what_is_wrong_with_the_model_is_told_before_the_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(run_file(stages=[1], steps=4))
    mark(f"{tmp_path}/checkpoints", "test")
    run = read_run_file(tmp_path / "run.toml").message("test")
    run.model.config_json = '{"hidden_size": 12, "no_such_key": 1}'
    preparation = Preparation(Node(tmp_path / "snapshots").equipment, asyncio.get_running_loop())
    with pytest.raises(ValueError, match=r"model\.config"):  # the data is not there
        await asyncio.to_thread(preparation.load, run, dialler("n0"), Allowed(["/"]), None)


async def test_a_run_that_goes_on_with_compiled_layers_is_timed_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    (tmp_path / "run.toml").write_text(run_file(stages=[1], steps=4))
    mark(f"{tmp_path}/checkpoints", "test")
    timed: list[bool] = []
    monkeypatch.setattr(preparation, "layer_flops", lambda model, *_: timed.append(model.compiles))
    monkeypatch.setattr(preparation, "can_compile", lambda _device: True)
    prepared = Preparation(Node(tmp_path / "snapshots").equipment, asyncio.get_running_loop())
    for compiles in (False, False, True, True):
        run = read_run_file(tmp_path / "run.toml").message("test")
        run.train.compile = compiles
        await asyncio.to_thread(prepared.load, run, dialler("n0"), Allowed(["/"]), None)
    assert timed == [False, True]


def on_any_disk(prepared: Preparation) -> Prepared:
    """What it says, without how much of the disk is free just now."""
    said = prepared.message()
    said.ClearField("disk_bytes")
    return said


async def test_a_node_that_is_welcomed_to_another_precision_is_timed_in_that_and_reads_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    (tmp_path / "run.toml").write_text(run_file(stages=[1], steps=5, precision="fp32"))
    mark(f"{tmp_path}/checkpoints", "test")
    run = read_run_file(tmp_path / "run.toml").message("test")
    prepared = Preparation(Node(tmp_path / "snapshots").equipment, asyncio.get_running_loop())
    assert await asyncio.to_thread(prepared.load, run, dialler("n0"), Allowed(["/"]), None)
    before = on_any_disk(prepared)
    monkeypatch.setattr(preparation, "load_data", None)  # which cannot be called
    monkeypatch.setattr(preparation, "layer_flops", lambda *_: 1.0)
    assert not await asyncio.to_thread(prepared.load, run, dialler("n0"), Allowed(["/"]), None)
    assert on_any_disk(prepared) == before
    other = Run()
    other.CopyFrom(run)
    other.train.precision = BF16
    assert await asyncio.to_thread(prepared.load, other, dialler("n0"), Allowed(["/"]), None), "it holds no state of it"
    now = on_any_disk(prepared)
    assert (before.precision, now.precision, now.flops) == (FP32, BF16, 1.0)
    assert now.layers[1].activation_bytes * 2 == before.layers[1].activation_bytes
    assert now.data_fingerprint == before.data_fingerprint


def snapshot_in(root: Path) -> Path:
    """The folder of the only snapshot under ``root``."""
    (file,) = root.rglob("bucket-00000*")
    return file.parent


async def test_a_commit_may_ask_for_a_snapshot_of_the_state_that_it_makes(node: Node, tmp_path: Path) -> None:
    node.adopt(even_plan(LAYERS, 1, 1, MICRO_BATCHES))
    assert (await node.reports.get()).plan_ready.generation == 1
    node.trainer.begin(Begin(generation=1, step=1))
    assert (await node.reports.get()).step_ready.step == 1
    node.trainer.conclude(Commit(generation=1, step=1, clips=UNCLIPPED, snapshot=True))
    told: dict[str, NodeMessage] = {}
    while told.keys() != {"moved", "step_ready"}:  # the next step goes on beside it
        message = await node.reports.get()
        told[message.WhichOneof("message") or ""] = message
    parts = told["moved"].moved
    assert (parts.step, parts.problem) == (1, "")
    held = node.equipment.store.held.buckets
    assert sorted(part.bucket for part in parts.parts) == sorted(held)
    folder = snapshot_in(tmp_path)
    copy = {index: Bucket(bucket.spec, torch.device("cpu"), torch.float64) for index, bucket in held.items()}
    for part in parts.parts:
        content = (folder / file_name(part.bucket)).read_bytes()
        assert blake3(content).digest() == part.digest
        loading = Loading(copy[part.bucket], "the snapshot")
        loading.take(content)
        loading.finish()
        assert torch.equal(copy[part.bucket].moments[1], held[part.bucket].moments[1])  # not of step 0, where it is 0


@pytest.mark.parametrize("folder", ["/etc", "file:///etc", "dir::file:///etc", "{}/link"])
async def test_a_checkpoint_that_the_coordinator_names_is_read_only_where_the_run_may_read(
    node: Node, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "link").symlink_to("/etc")
    run = read_run_file(tmp_path / "run.toml").message("test")
    node.trainer.prepare(run, dialler("n0"), Allowed([str(tmp_path)]))
    assert (await node.reports.get()).HasField("prepared")
    plan = even_plan(LAYERS, 1, 1, MICRO_BATCHES)
    donors = [Assignment.Donors() for _ in range(LAYERS)]
    source = SnapshotSource(folder=folder.format(tmp_path))
    node.trainer.adopt(assigned(plan, step=1, donors=donors, snapshot=source), lambda _: None)
    assert (await node.reports.get()).plan_failed.problem.startswith("checkpoint.uri")


@pytest.mark.parametrize("generation", [1, 4])
async def test_state_made_by_another_commit_of_the_same_step_does_not_count(node: Node, generation: int) -> None:
    """The step was trained again, in another generation, while this node was away."""
    plan = even_plan(LAYERS, 1, 1, MICRO_BATCHES)
    node.adopt(plan)
    assert (await node.reports.get()).plan_ready.generation == 1
    node.trainer.begin(Begin(generation=1, step=1))
    assert (await node.reports.get()).step_ready.step == 1
    node.trainer.conclude(Commit(generation=1, step=1, clips=UNCLIPPED, pause=True))
    assert (await node.reports.get()).applied.step == 1
    again = replace(plan, generation=5)
    donors = [Assignment.Donors(nodes=["n0"])] * LAYERS
    last = Commit(generation=generation, step=1, clips=UNCLIPPED)
    node.trainer.adopt(assigned(again, step=1, donors=donors, last_commit=last), lambda _: None)
    report = await node.reports.get()
    if generation == 1:
        assert report.plan_ready.generation == 5
    else:
        assert list(report.plan_failed.lost) == list(range(LAYERS))


async def test_until_a_plan_begins_a_node_has_what_it_held_though_it_got_another_state_for_the_plan(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it is to train with another island: its own may still be carried on."""
    plan = even_plan(LAYERS, 1, 1, MICRO_BATCHES)
    node.adopt(plan)
    assert (await node.reports.get()).plan_ready.generation == 1
    node.trainer.begin(Begin(generation=1, step=1))
    assert (await node.reports.get()).step_ready.step == 1
    node.trainer.conclude(Commit(generation=1, step=1, clips=UNCLIPPED, pause=True))
    assert (await node.reports.get()).applied.step == 1
    mine = dict(node.equipment.store.held.buckets)
    for check in ("check_checkpoint", "read_bucket"):  # the other state is zeros
        monkeypatch.setattr(f"dtfm.node.state.recovery.{check}", lambda *_, **__: None)
    others = assigned(
        replace(plan, generation=2),
        step=1,
        donors=[Assignment.Donors()] * LAYERS,
        snapshot=SnapshotSource(folder="memory://another"),
        last_commit=Commit(generation=1, step=1, clips=UNCLIPPED),
    )
    node.trainer.adopt(others, lambda _: None)
    assert (await node.reports.get()).plan_ready.generation == 2
    assert node.equipment.store.held.buckets == mine
    node.trainer.begin(Begin(generation=2, step=2))
    assert (await node.reports.get()).step_ready.step == 2
    assert not any(bucket in mine.values() for bucket in node.equipment.store.held.buckets.values())
