"""What members may do with the coordinator's disk: `disk.py`, and `most_bytes` of the core, which says how much."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core.copies.checkpoints import most_bytes
from dtfm.coordinator.core.transition import StopAsked
from dtfm.coordinator.service.checkpoint.disk import MOST_PIECE_BYTES, Disk, Forbidden
from dtfm.coordinator.service.grpc_services import Files
from dtfm.protos import control_pb2 as wire
from dtfm.protos.checkpoint_names import bucket_file, gathering_folder
from tests.coordinator.script import World, fresh_state, training

FOLDER = "step-00000002.run.partial"
FILE = f"{FOLDER}/{bucket_file(0, 'ab' * 16)}"
UPLOAD, ANOTHER = bytes(16), bytes([1]) * 16


def put(path: str = FILE, data: bytes = b"", upload: bytes = UPLOAD, **changes: Any) -> wire.PutRequest:
    return wire.PutRequest(path=path, data=data, upload=upload, **changes)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "run")


def files(disk: Disk, folder: str = FOLDER) -> list[tuple[str, int]]:
    return [(entry.path, entry.size_bytes) for entry in disk.look(folder)]


def test_a_file_is_there_once_all_of_it_has_come_in_any_order_and_any_number_of_times(disk: Disk) -> None:
    for data, offset in ((b"world", 6), (b"hello ", 0), (b"world", 6)):
        disk.put(put(data=data, offset=offset), most_bytes=100)
        assert files(disk) == []
    for _ in range(2):  # the answer to the first may have been lost
        disk.put(put(offset=11, last=True), most_bytes=100)
        assert files(disk) == [(FILE, 11)]
    assert disk.get(FILE, 0, 100) == b"hello world"
    assert disk.get(FILE, 6, 3) == b"wor"


def test_a_file_of_which_something_is_missing_does_not_become_whole(disk: Disk) -> None:
    disk.put(put(data=b"hello"), most_bytes=100)
    with pytest.raises(OSError, match="has 5 bytes of 11"):
        disk.put(put(offset=11, last=True), most_bytes=100)
    assert files(disk) == []


def test_two_attempts_do_not_mix_and_the_later_one_takes_the_place_of_the_first(disk: Disk, tmp_path: Path) -> None:
    disk.put(put(data=b"one"), most_bytes=100)
    later = f"{FOLDER}/{bucket_file(0, 'cd' * 16)}"
    disk.put(put(later, data=b"another", upload=ANOTHER), most_bytes=100)
    with pytest.raises(OSError, match="No such file"):
        disk.put(put(offset=3, last=True), most_bytes=100)
    disk.put(put(later, offset=7, last=True, upload=ANOTHER), most_bytes=100)
    assert disk.get(later, 0, 100) == b"another"
    assert len(list((tmp_path / "run").rglob("bucket-*"))) == 1


@pytest.mark.parametrize(
    ("request_", "most"),
    [
        (put(data=b"x" * 11), 10),
        (put(data=b"x", offset=10), 10),
        (put(data=b"x", offset=2**63), 10),
        (put(data=b"x"), 0),
        (put(data=bytes(MOST_PIECE_BYTES + 1)), 1 << 30),
        (put(data=b"x", upload=b"short"), 10),
    ],
)
def test_nobody_writes_more_than_it_may(disk: Disk, request_: wire.PutRequest, most: int) -> None:
    with pytest.raises(Forbidden):
        disk.put(request_, most)


@given(st.text(max_size=40) | st.sampled_from(["../x", "step-00000002/../../x", "/etc/passwd", "step-00000002/a/b"]))
def test_nobody_reaches_anything_else(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    disk = Disk(tmp_path_factory.getbasetemp() / "run")
    for step in (path, f"step-00000002/{path}"):
        if "/" in path or "\0" in path or step == path:
            with pytest.raises(Forbidden):
                disk.put(put(step, b"x"), 10)
            with pytest.raises(Forbidden):
                disk.get(step, 0, 1)


def test_a_disk_that_is_nearly_full_takes_nothing_and_says_how_much_is_left(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 29))
    with pytest.raises(OSError, match=r"has 0.5 GiB left at .*make room there, or name another place"):
        disk.put(put(data=b"x"), 10)


def checkpoint_under_way(uri: str = "coordinator:", **tables: dict[str, object]) -> World:
    """Of step 2: a sends the buckets 0 and 1, and b 2 and 3."""
    world = training(checkpoint={"uri": uri}, **tables)
    world.step()
    world.step()
    world.write_snapshot()
    return world


def test_who_is_to_send_a_bucket_may_write_its_file_and_nobody_else() -> None:
    state = checkpoint_under_way().state
    assert {node for node in "ab" if most_bytes(state, node, 2, bucket_file(0, "ab" * 16))} == {"a"}
    assert {node for node in "ab" if most_bytes(state, node, 2, bucket_file(3, "ab" * 16))} == {"b"}
    assert {node for node in "ab" if most_bytes(state, node, 2, "config.json")} == {"a"}, "it sends the first bucket"
    for file in (
        "model.safetensors",
        "adapter_config.json",
        "modeling.py",
        "manifest.json",
        "bucket-00000.safetensors.part",
        bucket_file(99, "ab" * 16),
    ):
        assert most_bytes(state, "a", 2, file) == 0
    assert most_bytes(state, "a", 1, bucket_file(0, "ab" * 16)) == 0, "no checkpoint of that step is under way"


def test_an_adapters_settings_are_a_file_of_runs_that_train_one() -> None:
    """Beside a whole model, transformers would load the model that the file names."""
    state = checkpoint_under_way(model={"pretrained": "some/model"}, adapter={"rank": 4}).state
    assert {node for node in "ab" if most_bytes(state, node, 2, "adapter_config.json")} == {"a"}
    assert most_bytes(state, "a", 2, "adapter_model.safetensors") == 0, "the coordinator writes it"


def test_nobody_writes_while_a_coordinator_that_stops_tidies_up() -> None:
    world = checkpoint_under_way()
    world.feed(StopAsked("Ctrl-C"))
    assert most_bytes(world.state, "a", 2, bucket_file(0, "ab" * 16)) == 0


class CallOfA:
    """A gate, and the context of a call, which is a's."""

    async def admit(self, context: Any, method: str) -> str:
        return "a"

    async def abort(self, code: grpc.StatusCode, sentence: str) -> None:
        assert code is grpc.StatusCode.PERMISSION_DENIED
        raise Forbidden(sentence)


async def test_a_file_comes_into_the_folder_of_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call: Any = CallOfA()
    world, name = checkpoint_under_way(), bucket_file(0, "ab" * 16)
    own = Files(lambda: world.state, call)
    os.makedirs(place := world.state.run.own_folder.removeprefix("file://"))
    for folder in ("step-00000002.another.partial", "step-00000002"):
        with pytest.raises(Forbidden, match="may write 0 bytes"):
            await own.Put(put(f"{folder}/{name}", b"x"), call)
    folder = gathering_folder("", 2, world.state.ledger.run_id).removeprefix("/")
    await own.Put(put(f"{folder}/{name}", b"x"), call)
    assert os.listdir(place) == [folder]


async def test_strangers_and_runs_with_other_storage_have_nothing_there() -> None:
    call: Any = CallOfA()
    world = checkpoint_under_way("memory://x")
    with pytest.raises(Forbidden, match="may write 0 bytes"):
        await Files(lambda: world.state, call).Put(put(data=b"x"), call)
    own = Files(lambda: fresh_state(checkpoint={"uri": "coordinator:"}), call)
    with pytest.raises(Forbidden, match="a is no member now"):
        await own.Get(wire.GetRequest(path=FILE), call)


def test_the_weights_that_the_run_begins_with_are_read_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/config.json").write_bytes(b"{}")
    disk = Disk(tmp_path / "mine", tmp_path / "first")
    assert [(each.path, each.size_bytes) for each in disk.look("pretrained")] == [("pretrained/config.json", 2)]
    assert disk.get("pretrained/config.json", 0, 10) == b"{}"
    with pytest.raises(Forbidden):
        disk.get("pretrained/../mine", 0, 10)
    with pytest.raises(Forbidden, match="may write 0 bytes"):
        disk.put(put(path="pretrained/config.json"), 0)
    with pytest.raises(Forbidden):
        Disk(tmp_path / "mine").look("pretrained")
    assert [file.name for file in (tmp_path / "first").iterdir()] == ["config.json"]
