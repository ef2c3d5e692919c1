"""How a run begins, or is resumed from its log or its checkpoint: `service/startup.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtfm.coordinator.config.run_file import parse_run
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.store import Store
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
    with pytest.raises(ValueError, match="holds run 'demo' already"):
        async with serving(tmp_path):
            pass
    async with serving(tmp_path, resume=True) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        committed = [event for event in served.events if isinstance(event, ev.StepCommitted)]
        assert [(event.step, event.loss) for event in committed] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    with pytest.raises(ValueError, match="is over"):
        async with serving(tmp_path, resume=True):
            pass


async def test_a_run_without_its_log_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run_id = await train_to_checkpoint(tmp_path)
    forget_log(tmp_path)
    with pytest.raises(ValueError, match="holds another run's checkpoints"):
        async with serving(tmp_path):
            pass
    async with serving(tmp_path, resume=True) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert served.server.state.ledger.run_id == run_id
        assert [event.step for event in served.events if isinstance(event, ev.StepCommitted)] == [3]


async def test_a_run_cannot_be_resumed_with_another_training_setup(tmp_path: Path) -> None:
    async with serving(tmp_path):
        pass
    with pytest.raises(ValueError, match="there is nothing to resume"):
        async with serving(tmp_path / "..", run_in(tmp_path / "none"), resume=True):
            pass
    with Store(store_url(tmp_path), write=True) as store:
        store.append([ev.RunStarted("id", run_in(tmp_path).model_dump(mode="json"))])
    with pytest.raises(ValueError, match=r"train.learning_rate is 0.5 in the run file, and was 0.003"):
        async with serving(tmp_path, run_in(tmp_path, train={"learning_rate": 0.5}), resume=True):
            pass
    sparing = {"activation_checkpointing": "layer", "optimizer_state": "host"}  # as a run that fits nowhere is advised
    async with serving(tmp_path, run_in(tmp_path, cluster={"nodes": 3}, train=sparing), resume=True) as served:
        assert served.server.state.run.cluster.nodes == 3
        assert served.server.state.run.train.optimizer_state == "host"


async def test_a_default_that_an_older_log_has_written_out_is_the_same_training_setup(tmp_path: Path) -> None:
    run = run_in(tmp_path).model_dump(mode="json")
    with Store(store_url(tmp_path), write=True) as store:
        store.append([ev.RunStarted("id", {**run, "data": {"tokenizer": "bytes"}})])
    async with serving(tmp_path, run_in(tmp_path), resume=True) as served:
        assert served.ledger.run_id == "id"
    with pytest.raises(ValueError, match=r"data.tokenizer is 'gpt2' in the run file, and was 'bytes'"):
        async with serving(tmp_path, parse_run({**run, "data": {"tokenizer": "gpt2"}}, "the test"), resume=True):
            pass
