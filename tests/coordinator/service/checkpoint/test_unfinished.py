"""A folder with the name of a checkpoint is a whole one: until then its files are in another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dtfm.coordinator.service.checkpoint.checkpoint_folder import write_manifest
from dtfm.coordinator.service.checkpoint.checkpoint_place import newest
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError, read_manifest
from dtfm.coordinator.service.checkpoint.unfinished import clear, publish
from dtfm.protos import control_pb2 as wire
from dtfm.protos.checkpoint_names import gathering_folder, gathering_of, step_folder
from dtfm.protos.identity.access import Role
from tests.coordinator.checkpoints import write_buckets, write_checkpoint
from tests.coordinator.serving import run_in, serving, train


def gathered(place: Path, step: int = 5, run_id: str = "run-id") -> Path:
    """The folder of a whole checkpoint that has not got its name yet."""
    folder = Path(gathering_folder(str(place), step, run_id))
    write_manifest(folder.as_uri(), {"name": "demo"}, run_id, step, write_buckets(folder))
    return folder


def publish_in(place: Path, source: Path) -> None:
    publish(source.as_uri(), step_folder(place.as_uri(), 5), "run-id")


def test_a_whole_checkpoint_gets_its_name(tmp_path: Path) -> None:
    source = gathered(tmp_path)
    assert newest(tmp_path.as_uri()) is None
    publish_in(tmp_path, source)
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000005"]
    assert read_manifest(step_folder(tmp_path.as_uri(), 5)).step == 5


@pytest.mark.parametrize("left", ["whole", "some"])
def test_it_takes_the_place_of_what_the_run_has_left_there(left: str, tmp_path: Path) -> None:
    if left == "whole":
        write_checkpoint(tmp_path)
    else:
        write_buckets(tmp_path / "step-00000005", 2)
    (tmp_path / "step-00000005/of before").touch()
    publish_in(tmp_path, gathered(tmp_path))
    assert read_manifest(step_folder(tmp_path.as_uri(), 5)).run_id == "run-id"
    assert not (tmp_path / "step-00000005/of before").exists()


def test_it_does_not_take_the_place_of_another_runs(tmp_path: Path) -> None:
    other = gathered(tmp_path, run_id="other")
    other.rename(tmp_path / "step-00000005")
    source = gathered(tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint of another run, 'demo'; name another place"):
        publish_in(tmp_path, source)
    assert source.exists()


def test_what_cannot_be_renamed_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is whole, and could not be renamed to .*No such file"):
        publish_in(tmp_path, tmp_path / "gone")


def test_what_is_unfinished_goes_and_no_other_runs_nor_what_is_under_way(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    for step, run_id in ((4, "run-id"), (6, "run-id"), (4, "other")):
        gathered(tmp_path, step, run_id)
    clear(tmp_path.as_uri(), "run-id", under_way=[6])
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == ["step-00000004.other.partial", "step-00000005", "step-00000006.run-id.partial"]
    clear(f"{tmp_path}/nothing there", "run-id")


def test_object_stores_have_no_folders_to_rename() -> None:
    assert gathering_folder("s3://bucket/run", 5, "run-id") == step_folder("s3://bucket/run", 5)
    assert gathering_of("step-00000005") is None
    publish("s3://bucket/step-00000005", "s3://bucket/step-00000005", "run-id")


def parts_of(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if not each.name.startswith("run-"))


async def test_a_coordinator_that_stops_while_a_checkpoint_comes_leaves_none_that_is_not_whole(tmp_path: Path) -> None:
    def keeps_its_files(message: wire.NodeMessage) -> wire.NodeMessage | None:
        return None if message.moved.in_checkpoint else message

    place = tmp_path / "checkpoints"
    run = run_in(tmp_path, train={"steps": 100_000}, checkpoint={"every": 1})
    async with serving(tmp_path, run) as served, served.node("a"), served.node("b", twist=keeps_its_files):
        folder = Path(gathering_folder(str(place), 1, served.server.ledger.run_id))

        def has_come() -> bool:
            upload = served.server.state.safekeeping.upload
            return upload is not None and bool(upload.files) and upload.step == 1

        await served.until(has_come)
        assert parts_of(place) == [folder.name]
        assert any(name.startswith("bucket-") for name in parts_of(folder))
        served.server.ask_to_stop("Ctrl-C")
        await asyncio.wait_for(asyncio.shield(served.task), 30)
    assert parts_of(place) == []


async def test_what_a_killed_coordinator_has_left_goes_with_the_next_start(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    async with serving(tmp_path) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        run_id = served.ledger.run_id
    whole = parts_of(place)
    assert whole == ["step-00000003"]
    gathered(place, 2, run_id)
    gathered(place, 2, "other")
    async with serving(tmp_path, run_in(tmp_path, train={"steps": 4})) as served:
        await served.invite(Role.NODE)  # it is answered after the start
        assert parts_of(place) == ["step-00000002.other.partial", *whole]
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert served.ledger.training.step == 4
    assert parts_of(place) == ["step-00000002.other.partial", "step-00000003", "step-00000004"]
