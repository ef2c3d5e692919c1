"""The files of snapshots on a disk, by run, node and step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dtfm.node.data.shared.storage import PIECE_BYTES
from dtfm.node.state.disk import ABANDONED_SECONDS, Disk
from dtfm.node.state.snapshot_files import file_name
from tests.node.state.snapshot_nodes import STEP, get, put


def test_before_a_run_is_loaded_nothing_is_there(tmp_path: Path) -> None:
    unopened = Disk(tmp_path, "a")
    assert unopened.contents == {}
    with pytest.raises(LookupError, match="NOT_HELD"):
        unopened.read(STEP, 0)


def test_names_of_nodes_and_runs_cannot_name_another_place(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for node, run in (("../..", "../../x"), ("a", ".."), ("a/b", "")):
        one = Disk(root, node)
        one.open(run)
        put(one, STEP, 0, b"state")
        assert get(one, STEP, 0) == b"state"
    assert len(list(root.iterdir())) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


def test_an_abandoned_run_is_removed(tmp_path: Path) -> None:
    old, recent, mine = Disk(tmp_path, "a"), Disk(tmp_path, "a"), Disk(tmp_path, "a")
    for one, run in ((old, "old"), (recent, "recent")):
        one.open(run)
        put(one, STEP, 0, b"state")
        if one is old:
            (old_folder,) = tmp_path.iterdir()
    long_ago = time.time() - ABANDONED_SECONDS - 60
    (recent_folder,) = (folder for folder in tmp_path.iterdir() if folder != old_folder)
    others = [tmp_path / "thesis", tmp_path / f"snapshots-{'0' * 32}" / "letters"]
    for other in others:
        other.mkdir(parents=True)
    for entry in tmp_path.iterdir():
        if entry != recent_folder:
            os.utime(entry, (long_ago, long_ago))
    mine.open("mine")
    assert all(other.exists() for other in others)
    assert (old.contents, recent.contents) == ({}, {STEP: {0: 5}})


def test_other_files_are_left_alone_and_not_counted(tmp_path: Path) -> None:
    one = Disk(tmp_path, "a")
    one.open("run")
    put(one, STEP, 0, b"state")
    (folder,) = tmp_path.iterdir()
    (folder / "notes").mkdir()
    (folder / f"step-{STEP:08d}" / f"{file_name(1)}.part").write_bytes(b"half")
    assert one.contents == {STEP: {0: 5}}
    one.keep([])
    assert [entry.name for entry in folder.iterdir()] == ["notes"]


def test_what_is_put_aside_has_no_name_and_is_not_counted(tmp_path: Path) -> None:
    one = Disk(tmp_path, "a")
    one.open("run")
    with one.scratch(5) as file:
        file.write(b"state")
        assert (list(tmp_path.iterdir()), one.contents) == ([], {})


@pytest.mark.parametrize("offset", [0, 3, PIECE_BYTES, PIECE_BYTES + 6, 2**64 - 1])
def test_a_file_is_read_from_any_byte_on(tmp_path: Path, offset: int) -> None:
    one, content = Disk(tmp_path, "a"), bytes(range(256)) * (PIECE_BYTES // 256) + b"letters"
    one.open("run")
    put(one, STEP, 0, content)
    size, pieces = one.read(STEP, 0, offset)
    read = list(pieces)
    assert b"".join(read) == content[offset:]
    assert size == len(content[offset:])
    assert max(map(len, read), default=0) <= PIECE_BYTES
