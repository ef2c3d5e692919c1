"""The manifest that makes a checkpoint whole, and how it is read again."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from dtfm.coordinator.service.checkpoint.checkpoint_folder import write_manifest
from dtfm.coordinator.service.checkpoint.checkpoint_place import newest, tidy
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError, manifest_and_digest, read_manifest
from dtfm.protos.checkpoint_names import bucket_file, step_folder
from tests.coordinator.checkpoints import write_buckets, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints")


def test_a_manifest_names_every_bucket(checkpoint: Path) -> None:
    fields = json.loads((checkpoint / "manifest.json").read_text())
    assert (fields["format"], fields["run"], fields["run_id"], fields["step"]) == (1, {"name": "demo"}, "run-id", 5)
    assert [bucket["index"] for bucket in fields["buckets"]] == [0, 1, 2]
    assert set(fields["buckets"][0]) == {"index", "file", "bytes", "blake3", "moments"}
    manifest = read_manifest(checkpoint.as_uri())
    assert (manifest.step, manifest.run_id, len(manifest.buckets)) == (5, "run-id", 3)
    assert not list(checkpoint.glob("*.part"))


def test_a_manifest_is_named_by_its_digest(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000005"
    digest = write_manifest(folder.as_uri(), {}, "run-id", 5, write_buckets(folder))
    assert manifest_and_digest(folder.as_uri()) == (read_manifest(folder.as_uri()), digest)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace("run-id", "run-ie"))
    assert manifest_and_digest(folder.as_uri())[1] != digest


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "must name storage that all machines share"), (b"short", "has 5 bytes, though its node wrote")],
)
def test_a_missing_or_truncated_bucket_prevents_the_manifest(tmp_path: Path, content: bytes | None, words: str) -> None:
    folder = tmp_path / "step-00000005"
    written = write_buckets(folder)
    bucket = folder / bucket_file(1, written[1].nonce)
    bucket.unlink()
    if content is not None:
        bucket.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        write_manifest(folder.as_uri(), {}, "run-id", 5, written)
    assert not (folder / "manifest.json").exists()


def test_newest_finds_the_newest_whole_checkpoint(checkpoint: Path) -> None:
    uri = checkpoint.parent.as_uri()
    assert newest(uri) == step_folder(uri, 5) == checkpoint.as_uri()
    write_buckets(checkpoint.parent / "step-00000007")  # half-written
    (checkpoint.parent / "step-oops").mkdir()
    assert newest(uri) == checkpoint.as_uri()
    assert newest(f"{uri}/elsewhere") is None


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Whole checkpoints of steps 10, 20, 30, 40 and 50; steps 15 and 45 were never finished."""
    for step in (10, 15, 20, 30, 40, 45, 50):
        folder = tmp_path / f"step-{step:08d}"
        parts = write_buckets(folder)
        if step not in (15, 45):
            write_manifest(folder.as_uri(), {"name": "demo"}, "run-id", step, parts)
    (tmp_path / "data-ab12").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("newest_step", "keep", "under_way", "left"),
    [
        (50, 3, (), [30, 40, 50]),
        (50, 3, (15, 45), [15, 30, 40, 45, 50]),
        (50, 1, (), [50]),
        (50, 9, (), [10, 20, 30, 40, 50]),
        # One that the log does not know of: later ones are left alone, if not given up, and the newest that it knows stays.
        (40, 1, (), [40, 50]),
    ],
)
def test_older_checkpoints_are_deleted(
    many: Path, newest_step: int, keep: int, under_way: tuple[int, ...], left: list[int]
) -> None:
    tidy(many.as_uri(), "run-id", newest_step, keep, under_way=under_way, given_up=(15, 45, 60))
    assert steps_in(many) == left
    assert (many / "data-ab12").exists()
    assert newest(many.as_uri()) == step_folder(many.as_uri(), 50)


def test_one_that_was_undone_goes_though_it_is_whole_and_the_newest(many: Path) -> None:
    tidy(many.as_uri(), "run-id", 40, 3, given_up=(50,))
    assert steps_in(many)[-1] < 50
    assert newest(many.as_uri()) == step_folder(many.as_uri(), 40)


def test_what_an_earlier_attempt_at_the_newest_left_is_deleted(many: Path) -> None:
    folder = many / "step-00000050"
    before = set(folder.iterdir())
    (folder / bucket_file(1, "ab" * 16)).write_bytes(b"of another node")
    tidy(many.as_uri(), "run-id", 50, 3, under_way=(50,))
    assert set(folder.iterdir()) > before
    tidy(many.as_uri(), "run-id", 50, 3)
    assert set(folder.iterdir()) == before


def test_what_another_run_wrote_stays_and_does_not_count(many: Path) -> None:
    """Two runs share the folder: the other wrote 35, and began 45 and 48."""
    parts = write_buckets(folder := many / "step-00000035")
    write_manifest(folder.as_uri(), {"name": "other"}, "other", 35, parts)
    write_buckets(many / "step-00000048")
    tidy(many.as_uri(), "run-id", 50, 3, given_up=(15, 35))
    assert steps_in(many) == [30, 35, 40, 45, 48, 50]
    (many / "step-00000035" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"not known whose checkpoint this is: .*step-00000035"):
        tidy(many.as_uri(), "run-id", 50, 1)
    assert steps_in(many) == [35, 45, 48, 50]


def test_a_folder_that_cannot_be_deleted_is_no_longer_a_checkpoint_and_hinders_no_other(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = type(fsspec.filesystem("file"))
    remove = filesystem.rm

    def fail(self: object, path: str, **more: object) -> None:
        if "00000010" in path:
            raise OSError("busy")
        remove(self, path, **more)

    monkeypatch.setattr(filesystem, "rm", fail)
    with pytest.raises(CheckpointError, match=r"step-00000010 could not be deleted: busy"):
        tidy(many.as_uri(), "run-id", 50, 2, given_up=(15, 45))
    assert steps_in(many) == [10, 40, 50]
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        read_manifest((many / "step-00000010").as_uri())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "holds no whole checkpoint"),
        ("{", "cannot be read"),
        ("[]", "malformed"),
        ('{"format": 2}', "has checkpoint format 2"),
        ('{"format": 1}', "malformed"),
        (
            '{"format": 1, "run": {}, "run_id": "x", "step": 1, '
            '"buckets": [{"index": 0, "file": "../../x", "bytes": 1, "blake3": ""}]}',
            "names files outside",
        ),
    ],
)
def test_an_unusable_manifest_is_refused_with_its_reason(checkpoint: Path, content: str | None, words: str) -> None:
    (checkpoint / "manifest.json").unlink()
    if content is not None:
        (checkpoint / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_manifest(checkpoint.as_uri())
