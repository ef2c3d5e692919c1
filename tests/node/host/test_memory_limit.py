"""What a container may still take of memory: `node/host/device.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtfm.node.host import device
from dtfm.node.host.device import room_in_groups

UNLIMITED_V1 = 9223372036854771712
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def group(folder: Path, files: tuple[str, str, str], limit: object, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"rss 1\n{files[2]} {cached}\n")


@pytest.mark.parametrize(("files", "line", "top"), [(V1, "4:memory:/a/b", "memory"), (V2, "0::/a/b", ".")])
def test_the_tightest_group_counts_and_cached_files_are_free(
    tmp_path: Path, files: tuple[str, str, str], line: str, top: str
) -> None:
    (tmp_path / "own").write_text(f"8:pids:/\n{line}\n")
    group(tmp_path / top / "a", files, 1000, 700, 100)
    group(tmp_path / top / "a/b", files, 5000, 600, 0)
    assert room_in_groups(tmp_path / "own", tmp_path) == 400
    group(tmp_path / top / "a/b", files, 700, 600, 50)
    assert room_in_groups(tmp_path / "own", tmp_path) == 150
    group(tmp_path / top / "a/b", files, 500, 600, 0)
    assert room_in_groups(tmp_path / "own", tmp_path) == 0


def test_a_containers_group_is_at_the_top_whatever_its_path_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/docker/0123\n")
    group(tmp_path / "memory", V1, 1000, 300, 0)
    assert room_in_groups(tmp_path / "own", tmp_path) == 700


def test_without_a_limit_nothing_is_said(tmp_path: Path) -> None:
    assert room_in_groups(tmp_path / "own", tmp_path) is None
    (tmp_path / "own").write_text("0::/a\n")
    group(tmp_path / "a", V2, "max", 300, 0)
    assert room_in_groups(tmp_path / "own", tmp_path) is None


def test_a_cpu_has_no_more_memory_than_its_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_text("0::/\n")
    group(tmp_path, V2, 1 << 20, 1000, 0)
    monkeypatch.setattr(device, "room_in_groups", lambda: room_in_groups(tmp_path / "own", tmp_path))
    assert device.free_memory(device.open_device("cpu")) == (1 << 20) - 1000
    monkeypatch.setattr(device, "room_in_groups", lambda: UNLIMITED_V1)
    assert device.free_memory(device.open_device("cpu")) < UNLIMITED_V1
