"""A file that is written piece by piece is there in whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from dtfm.coordinator.service.checkpoint.checkpoint_place import mark
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError
from dtfm.node.data.shared.storage import PIECE_BYTES, NewFile, check_place
from dtfm.node.state.snapshot_files import read_pieces

CONTENT = b"letters" * (PIECE_BYTES // 4)


def write_half(folder: str, name: str) -> None:
    with NewFile(folder, name) as file:
        file.write(CONTENT)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_it_is_there_when_it_is_finished_and_read_in_pieces(scheme: str, tmp_path: Path) -> None:
    folder = f"file://{tmp_path}/new" if scheme == "file" else f"memory://{uuid4().hex}"
    with NewFile(folder, "name") as file:
        for start in range(0, len(CONTENT), 1000):
            file.write(CONTENT[start : start + 1000])
        file.finish()
    fs, path = fsspec.core.url_to_fs(folder)
    assert [name.rpartition("/")[2] for name in fs.ls(path, detail=False)] == ["name"]
    pieces = list(read_pieces(folder, "name", len(CONTENT)))
    assert b"".join(pieces) == CONTENT
    assert max(map(len, pieces)) == PIECE_BYTES


def test_an_unfinished_one_leaves_the_older_one_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "name").write_bytes(b"older")
    write_half(str(tmp_path), "name")
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("name", b"older")]


class ObjectStore(MemoryFileSystem):  # type: ignore[misc]
    """As s3fs: what is written is uploaded in parts, and closing the file makes the object."""

    protocol = "parts"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: object) -> AbstractBufferedFile:
        return Upload(self, path, mode, block_size=block_size or 5 << 20)


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    made: list[str] = []  # noqa: RUF012
    aborted: list[str] = []  # noqa: RUF012

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.made.append(self.path)
        return True

    def _initiate_upload(self) -> None:
        pass

    def discard(self) -> None:
        self.aborted.append(self.path)


def test_an_unfinished_upload_is_aborted() -> None:
    fsspec.register_implementation("parts", ObjectStore, clobber=True)
    with NewFile("parts://bucket", "whole") as file:
        file.write(CONTENT)
        file.finish()
    write_half("parts://bucket", "half")
    assert (len(Upload.made), len(Upload.aborted)) == (1, 1)
    assert Upload.made[0].endswith("whole")
    assert Upload.aborted[0].endswith("half")


def test_a_folder_without_the_coordinators_mark_is_not_the_same_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not the same place on this machine .* lacks the file run-ab"):
        check_place(tmp_path.as_uri(), "ab", "a node")
    mark(tmp_path.as_uri(), "ab")
    check_place(tmp_path.as_uri(), "ab", "a node")


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    mark(tmp_path.as_uri(), "ab")
    monkeypatch.setattr("builtins.open", raising(OSError(code, os.strerror(code)), open))
    with pytest.raises(ValueError, match=rf"cannot be .* from this machine: .*{os.strerror(code)}"):
        check_place(tmp_path.as_uri(), "ab", "a node")


def test_trouble_that_may_pass_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mark(tmp_path.as_uri(), "ab")
    monkeypatch.setattr("builtins.open", raising(TimeoutError("no answer"), open))
    check_place(tmp_path.as_uri(), "ab", "a node")
    assert "cannot be reached now: TimeoutError: no answer" in caplog.text


def test_where_the_coordinator_cannot_write_the_run_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written to .*name another place with checkpoint.uri"):
        mark((tmp_path / "file").as_uri(), "ab")


def raising(error: OSError, real: Any) -> Any:
    """In place of ``open``: whatever is to be written raises ``error``."""

    def fails(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "w" in mode:
            raise error
        return real(path, mode, *rest, **more)

    return fails
