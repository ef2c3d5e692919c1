"""How a run begins, goes on from its log or its checkpoint, or starts over: `service/startup.py`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.service.startup import open_run, start_over
from dtfm.coordinator.store.store import Store
from dtfm.protos import control_pb2 as wire
from dtfm.protos.checkpoint_names import bucket_file
from dtfm.protos.run_file.data_tables import Data
from dtfm.protos.run_file.model_tables import Model
from dtfm.protos.run_file.run_file import RunFile, parse_run
from tests.coordinator.checkpoints import write_buckets, write_checkpoint
from tests.coordinator.fake_node import no_vote_for
from tests.coordinator.serving import run_in, serving, train
from tests.coordinator.stores import store_url


def forget_log(folder: Path) -> None:
    for file in folder.glob("dtfm.db*"):
        file.unlink()


async def train_to_checkpoint(folder: Path) -> str:
    """The coordinator stops when the checkpoint of step 2 is whole. Returns the run's id."""
    no_vote = no_vote_for(3)
    async with serving(folder) as served, served.node("a", twist=no_vote), served.node("b", twist=no_vote):
        await served.until(lambda: bool(served.ledger.copies.checkpoints))
        return served.server.state.ledger.run_id


async def test_a_run_resumed_from_its_log_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    await train_to_checkpoint(tmp_path)
    async with serving(tmp_path) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        committed = [event for event in served.events if isinstance(event, ev.StepCommitted)]
        assert [(event.step, event.loss) for event in committed] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    async with serving(tmp_path, stays=True) as served, served.node("a") as late:
        await asyncio.wait_for(late.over.wait(), 10)
        assert late.finish is not None
        assert late.finish.reason.startswith("The run is over, step 3: ")
        served.server.ask_to_stop("Ctrl-C")
        assert await asyncio.wait_for(served.task, 10) == 0


@pytest.mark.usefixtures("in_sqlite")
async def test_a_run_without_its_log_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run_id = await train_to_checkpoint(tmp_path)
    forget_log(tmp_path)
    with pytest.raises(ValueError, match=r"holds the checkpoints of run 'demo' .step 2.; give run 'other' another"):
        begin(tmp_path, run_in(tmp_path).model_copy(update={"name": "other"}))
    async with serving(tmp_path) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert served.server.state.ledger.run_id == run_id
        assert [event.step for event in served.events if isinstance(event, ev.StepCommitted)] == [3]


async def test_a_run_cannot_be_resumed_with_another_training_setup(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append([ev.RunStarted("id", run_in(tmp_path).model_dump(mode="json"))])
    with pytest.raises(ValueError, match=r"train.beta1 is 0.5 in the run file, and was 0.9"):
        async with serving(tmp_path, run_in(tmp_path, train={"beta1": 0.5})):
            pass
    sparing = {"activation_checkpointing": "layer", "optimizer_state": "host"}  # as a run that fits nowhere is advised
    async with serving(tmp_path, run_in(tmp_path, cluster={"nodes": 3}, train=sparing)) as served:
        assert served.server.state.run.cluster.nodes == 3
        assert served.server.state.run.train.optimizer_state == "host"


async def test_what_was_set_stays_at_a_start_unless_the_run_file_is_edited(tmp_path: Path) -> None:
    file = run_in(tmp_path, train={"steps": 30})
    with Store(store_url(tmp_path), write=True) as store:
        store.append([ev.RunStarted("id", file.model_dump(mode="json"))])
        store.append([ev.RunChanged("me", "train.steps", 40, 30), ev.RunChanged("me", "checkpoint.every", 7, 2)])

    def in_force(**changes: dict[str, Any]) -> tuple[int, int, int]:
        run = parse_run(begin(tmp_path, run_in(tmp_path, **changes) if changes else None).run, "the log")
        return run.train.steps, run.checkpoint.every, run.train.warmup_steps

    warm_up = file.train.warmup_steps
    assert in_force(train={"steps": 30}) == (40, 7, warm_up)
    assert in_force() == (40, 7, warm_up)
    assert in_force(train={"steps": 300}) == (300, 7, warm_up), "which follows from the steps only when the run starts"
    assert in_force(train={"steps": 300}, checkpoint={"every": 9}) == (300, 9, warm_up)


@pytest.mark.parametrize("from_the_log", [True, False])
async def test_the_precision_that_the_first_node_decided_stays(tmp_path: Path, from_the_log: bool) -> None:
    auto = run_in(tmp_path, train={"precision": "auto"})
    no_vote = no_vote_for(3)
    async with serving(tmp_path, auto) as served, served.node("a", twist=no_vote), served.node("b", twist=no_vote):
        await served.until(lambda: bool(served.ledger.copies.checkpoints))
    if not from_the_log:
        forget_log(tmp_path)
    assert [begin(tmp_path, auto).run["train"]["precision"] for _ in range(2)] == ["fp32", "fp32"]
    with pytest.raises(
        ValueError, match=r"train.precision is 'bf16' in the run file, and was 'fp32' when the run started"
    ):
        begin(tmp_path, run_in(tmp_path, train={"precision": "bf16"}))


async def test_a_run_file_with_fewer_steps_than_are_trained_is_refused(tmp_path: Path) -> None:
    await train_to_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"train.steps = 2: must be at least 3, as 2 steps are trained"):
        begin(tmp_path, run_in(tmp_path, train={"steps": 2}))
    forget_log(tmp_path)
    with pytest.raises(ValueError, match=r"train.steps = 1: must be at least 3, as 2 steps are trained"):
        begin(tmp_path, run_in(tmp_path, train={"steps": 1}))


async def test_a_run_that_is_over_goes_on_with_more_steps_in_the_run_file(tmp_path: Path) -> None:
    await train_to_checkpoint(tmp_path)
    async with serving(tmp_path) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
    async with serving(tmp_path, run_in(tmp_path, train={"steps": 4})) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert [event.step for event in served.events if isinstance(event, ev.StepCommitted)] == [1, 2, 3, 4]


async def test_a_place_is_tried_before_the_run_has_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    await train_to_checkpoint(tmp_path / "taken")
    async with serving(tmp_path) as served:

        async def name(place: Path) -> str:
            request = wire.SteerRequest(wish=wire.SteerRequest.SET, key="checkpoint.uri", value=str(place))
            try:
                reply = await served.server.ask(request, served.operator)
                assert isinstance(reply, wire.Done)
                return reply.sentence
            except Refused as refused:
                return str(refused)

        assert "checkpoints cannot be written to" in await name(tmp_path / "file" / "below")
        assert "holds checkpoints of another run, 'demo'; name another place" in await name(
            tmp_path / "taken/checkpoints"
        )
        assert "set checkpoint.uri to file:///" in await name(tmp_path / "free")
        assert [path.name for path in (tmp_path / "free").iterdir()] == [f"run-{served.ledger.run_id}"]


def begin(folder: Path, run: RunFile | None) -> Ledger:
    """What a coordinator with this run file begins with, or goes on with."""
    with Store(store_url(folder), write=True) as store:
        state, _, events = open_run(store, run)
        store.append(events)
        return state.ledger


def test_without_a_run_file_the_run_in_the_store_goes_on_and_another_run_is_refused_by_name(tmp_path: Path) -> None:
    started = begin(tmp_path, run_in(tmp_path))
    assert begin(tmp_path, None).run_id == started.run_id
    with pytest.raises(ValueError, match=r"holds run 'demo' \(step 0\), and the run file is of run 'second'"):
        begin(tmp_path, RunFile(name="second"))


@pytest.mark.usefixtures("in_sqlite")
def test_starting_over_gives_other_names_to_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFile(name="mine")
    assert start_over(store_url(tmp_path), run) == [], "there is nothing yet"
    started = begin(tmp_path, run)
    whole = tmp_path / "dtfm-runs" / "mine" / "step-00000002"
    whole.mkdir(parents=True)
    (whole / "manifest.json").touch()
    (tmp_path / "dtfm-runs" / "mine.1").touch()  # of an earlier time
    aside = [str(tmp_path / "dtfm-runs" / "mine.2"), str(tmp_path / "dtfm.1.db")]
    assert start_over(store_url(tmp_path), run) == aside
    assert (tmp_path / "dtfm-runs" / "mine.2" / whole.name / "manifest.json").exists()
    with Store(f"sqlite:///{aside[1]}", write=False) as store:
        assert fold(record.event for record in store.read()).run_id == started.run_id
    assert begin(tmp_path, run).run_id != started.run_id


def weights_of(folder: Path, step: int) -> None:
    """A checkpoint with the weights alone, of a run with a tokenizer."""
    target = folder / f"step-{step:08d}"
    files = [replace(file, moments="00" * 64) for file in write_buckets(target)]
    run = RunFile(name="first", data=Data(tokenizer="gpt2"))
    text = {"run": run.model_dump(mode="json"), "run_id": "x", "step": step, "format": 1}
    buckets = [
        {
            "index": i,
            "file": bucket_file(i, file.nonce),
            "bytes": file.size_bytes,
            "blake3": file.digest,
            "moments": file.moments,
        }
        for i, file in enumerate(files)
    ]
    (target / "manifest.json").write_text(json.dumps({**text, "buckets": buckets}))


def test_a_run_begins_with_the_newest_weights_of_another_and_keeps_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "dtfm-runs/first"
    for step in (2, 4):
        weights_of(first, step)
    second = RunFile(name="second", model=Model(pretrained="dtfm-runs/first"))
    run = parse_run(begin(tmp_path, second).run, "the log")
    assert run.own_weights == first / "step-00000004"
    sent = run.message("")
    assert (sent.model.pretrained, sent.data.tokenizer) == ("coordinator://disk/pretrained", "gpt2")
    weights_of(first, 6)
    assert parse_run(begin(tmp_path, second).run, "the log").own_weights == run.own_weights
    with pytest.raises(
        ValueError, match=r"model.pretrained is 'dtfm-runs/first/step-00000006' in the run file, and was"
    ):
        begin(tmp_path, RunFile(name="second", model=Model(pretrained="dtfm-runs/first/step-00000006")))


def test_a_run_that_is_not_there_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights_of(tmp_path / "dtfm-runs/first", 2)
    with pytest.raises(ValueError, match=r"there is no folder .*/dtfm-runs/frist; dtfm-runs has: first"):
        begin(tmp_path, RunFile(name="second", model=Model(pretrained="dtfm-runs/frist")))


def test_no_run_begins_with_a_checkpoint_of_all_of_the_state(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"has all of the state, .*dtfm-coordinator export DIR --checkpoint file:"):
        begin(tmp_path, RunFile(name="second", model=Model(pretrained=str(folder))))


def test_a_place_that_others_write_to_is_not_renamed(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    started = begin(tmp_path, run)
    whole = tmp_path / "checkpoints" / "step-00000002"
    whole.mkdir(parents=True)
    (whole / "manifest.json").touch()
    with pytest.raises(ValueError, match="holds checkpoints already; --new needs another name"):
        start_over(store_url(tmp_path), run)
    assert begin(tmp_path, run).run_id == started.run_id
