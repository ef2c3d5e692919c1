"""Whoever writes a bucket cannot give its tensors other names: members agree on these before the run begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from safetensors.numpy import load

from dtfm.coordinator.command.weights.exporting import NotTheLogs, export_checkpoint
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.events import CheckpointFile
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.service.checkpoint.checkpoint_folder import FIRST_BYTES, write_manifest
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError
from dtfm.protos import control_pb2 as wire
from dtfm.protos.bucket_layout import LAYOUT_BYTES, layout_digest
from dtfm.protos.checkpoint_names import bucket_file
from tests.coordinator.answers import bucket_layout
from tests.coordinator.every_event import DESCRIBED
from tests.coordinator.script import BUCKETS, World, fresh_state, prepared, refusal_of, training

NAMES = ("up", "down")


def content(names: tuple[str, ...] = NAMES, padding: int = 0) -> bytes:
    """A bucket with two weights of one shape, the values 1 and 2, and moments, as nodes write it."""
    entries = [
        f'"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{4 * i},{4 * i + 4}]}}' for i, name in enumerate(names)
    ]
    for i, moment in enumerate(("exp_avg", "exp_avg_sq"), 1):
        entries.append(f'"optimizer.{moment}":{{"dtype":"F32","shape":[2],"data_offsets":[{8 * i},{8 * i + 8}]}}')
    text = "{" + ",".join(entries) + "}" + " " * padding
    values = b"\0\0\x80\x3f" + b"\0\0\0\x40" + bytes(16)
    return len(text).to_bytes(8, "little") + text.encode() + values


def layout(of: bytes = content()) -> str:
    """What is said of a bucket whose files are like this one."""
    begin = 8 + int.from_bytes(of[:8], "little")
    return 2 * layout_digest(of[8:begin], len(of) - begin).hex()


def written(folder: Path, of: bytes) -> list[CheckpointFile]:
    folder.mkdir(parents=True)
    digest = blake3(of).hexdigest()
    (folder / bucket_file(0, digest[:32])).write_bytes(of)
    return [CheckpointFile(len(of), digest, digest[:32])]


def make(folder: Path, of: bytes, said: str) -> str:
    return write_manifest(folder.as_uri(), {}, "run-id", 5, written(folder, of), lambda _: said)


@pytest.mark.parametrize("padding", [0, FIRST_BYTES])
def test_a_checkpoint_whose_tensors_have_the_names_of_the_runs_model_becomes_whole(
    tmp_path: Path, padding: int
) -> None:
    of = content(padding=padding)
    assert make(tmp_path / "a", of, layout(of))


@pytest.mark.parametrize(
    "of",
    [
        content(("down", "up")),
        content(("up", "up")),
        content(("down", "up"), padding=FIRST_BYTES),
        content() + bytes(4),
        b"no header",
        bytes(40),
    ],
)
def test_one_with_others_does_not_and_it_is_known_whose_bucket_it_was(tmp_path: Path, of: bytes) -> None:
    with pytest.raises(CheckpointError, match="does not have the tensors that the run's model has") as refused:
        make(tmp_path / "a", of, layout())
    assert refused.value.bucket == 0
    assert not (tmp_path / "a" / "manifest.json").exists()


def log_of(folder: Path) -> Ledger:
    digest = blake3((folder / "manifest.json").read_bytes()).hexdigest()
    described = ev.RunDescribed(replace(DESCRIBED, layouts=layout()))
    return fold([ev.RunStarted("run-id", {}), described, ev.CheckpointWritten(5, folder.as_uri(), digest)])


def test_parameters_of_one_shape_that_were_exchanged_are_not_exported(tmp_path: Path) -> None:
    for name, of in (("right", content()), ("wrong", content(("down", "up")))):
        write_manifest((tmp_path / name).as_uri(), {}, "run-id", 5, written(tmp_path / name, of))
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    with pytest.raises(NotTheLogs, match="its writer has made it up"):
        export_checkpoint(wrong.as_uri(), tmp_path / "out", log_of(wrong))
    export_checkpoint(right.as_uri(), tmp_path / "out", log_of(right))
    assert load((tmp_path / "out" / "model.safetensors").read_bytes())["down"][0] == 2.0


def test_what_members_say_of_the_layouts_must_agree_and_is_pinned_with_the_workload() -> None:
    world = training()
    described = world.events(ev.RunDescribed)[0].described
    assert described.layout_of(1) == bucket_layout(1).hex()
    other = prepared(layouts=prepared().prepared.layouts[:-1] + b"x")
    refusal = refusal_of(world, world.prepare("liar", other))
    assert refusal.reason == wire.WORKLOAD_DIFFERS
    assert "the layout of bucket 3" in refusal.sentence
    assert described.workload_digest != replace(described, layouts="00").workload_digest


@pytest.mark.parametrize("size", [0, 1, LAYOUT_BYTES * BUCKETS - 1, LAYOUT_BYTES * (BUCKETS + 1)])
def test_there_is_one_for_each_bucket(size: int) -> None:
    world = World(fresh_state())
    refusal = refusal_of(world, world.prepare("a", prepared(layouts=bytes(size))))
    assert refusal.reason == wire.MALFORMED
