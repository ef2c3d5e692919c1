"""Keys lie in files that only their owner reads."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dtfm.protos.identity.private_files import MOST_BYTES, read_private, state_folder, write_private


def test_a_private_file_is_read_back_and_nobody_else_may(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key"
    write_private(path, b"first")
    write_private(path, b"second")
    assert read_private(path) == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_its_name_is_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flushed, fsync = tmp_path / "key", [], os.fsync

    def noticed(handle: int) -> None:
        flushed.append((stat.S_ISDIR(os.fstat(handle).st_mode), path.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noticed)
    write_private(path, b"key")
    assert flushed == [(False, False), (True, True)]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_may_read_or_change_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    write_private(path, b"key")
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"chmod 600 {path}"):
        read_private(path)


def test_a_file_that_is_not_there_or_not_ours(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_private(tmp_path / "none")
    write_private(tmp_path / "large", bytes(MOST_BYTES + 1))
    with pytest.raises(ValueError, match="larger than"):
        read_private(tmp_path / "large")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write"):
        write_private(tmp_path / "file" / "key", b"")


def test_the_state_folder_follows_the_platforms_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "dtfm"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local" / "state" / "dtfm"
