"""The files of backups, by run, node and step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dtfm.node.state.snapshot_files import file_name
from dtfm.node.state.disk import ABANDONED_SECONDS, Disk
from tests.node.state.snapshot_nodes import STEP


def test_before_a_run_is_read_nothing_is_there(tmp_path: Path) -> None:
    unopened = Disk(tmp_path, "a")
    assert unopened.contents == {}
    with pytest.raises(LookupError, match="NOT_HELD"):
        unopened.read(STEP, 0)


def test_names_of_nodes_and_runs_lead_nowhere_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for node, run in (("../..", "../../x"), ("a", ".."), ("a/b", "")):
        one = Disk(root, node)
        one.open(run)
        one.write(STEP, 0, b"state")
        assert one.read(STEP, 0) == b"state"
    assert len(list(root.iterdir())) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


def test_what_another_run_left_long_ago_is_removed(tmp_path: Path) -> None:
    old, recent, mine = Disk(tmp_path, "a"), Disk(tmp_path, "a"), Disk(tmp_path, "a")
    for one, run in ((old, "old"), (recent, "recent")):
        one.open(run)
        one.write(STEP, 0, b"state")
    long_ago = time.time() - ABANDONED_SECONDS - 60
    others = [tmp_path / "thesis", tmp_path / f"backup-{'0' * 32}" / "letters"]
    for other in others:
        other.mkdir(parents=True)
    for entry in tmp_path.iterdir():
        if entry != recent._folder:
            os.utime(entry, (long_ago, long_ago))
    mine.open("mine")
    assert all(other.exists() for other in others)
    assert (old.contents, recent.contents) == ({}, {STEP: {0: 5}})


def test_what_is_no_backup_is_left_alone_and_not_counted(tmp_path: Path) -> None:
    one = Disk(tmp_path, "a")
    one.open("run")
    one.write(STEP, 0, b"state")
    assert one._folder is not None
    (one._folder / "notes").mkdir()
    (one._folder / f"step-{STEP:08d}" / f"{file_name(1)}.part").write_bytes(b"half")
    assert one.contents == {STEP: {0: 5}}
    one.keep([])
    assert [entry.name for entry in one._folder.iterdir()] == ["notes"]
