"""Packed frozen parameters on this machine's disk: found again, shared by processes, bounded, and never a reason to fail."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dtfm.node.data.shared.cache import MOST_UNUSED, UNUSED_SECONDS
from dtfm.node.model import frozen_cache
from dtfm.node.model.frozen_cache import FrozenCache, digest_of

NAME = "model.layers.0.mlp.up_proj.weight"
PARTS = {
    "values": torch.arange(256, dtype=torch.uint8).view(128, 2),
    "scales": torch.linspace(0, 1, 4, dtype=torch.bfloat16),
    "mean": torch.tensor(0.25),
}
DIGEST = digest_of(PARTS)
SIZE = sum(part.nbytes for part in PARTS.values())
Usage = namedtuple("Usage", "total used free")


def begun(root: Path, model: bytes = b"a model", wanted: int = SIZE) -> FrozenCache:
    cache = FrozenCache(root, model)
    cache.begin({NAME: wanted})
    return cache


def kept(root: Path, model: bytes = b"a model", name: str = NAME) -> FrozenCache:
    cache = begun(root, model)
    with cache.turn(name, lambda: True):
        cache.keep(name, PARTS, DIGEST)
    return cache


def found(cache: FrozenCache, name: str = NAME) -> Mapping[str, torch.Tensor] | None:
    return cache.find(name, lambda parts, digest: parts if digest == digest_of(parts) else None)


def folders(root: Path) -> int:
    return sum(each.is_dir() for each in root.iterdir())


def file_of(root: Path) -> Path:
    (path,) = root.glob("*/*.safetensors")
    return path


def free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, free))


def test_what_is_kept_is_found_by_the_next_process(tmp_path: Path) -> None:
    kept(tmp_path)
    again = found(begun(tmp_path))
    assert again is not None
    assert {name: part.dtype for name, part in again.items()} == {name: part.dtype for name, part in PARTS.items()}
    assert all(torch.equal(part, PARTS[name]) for name, part in again.items())
    assert digest_of(again) == digest_of(PARTS)


def test_another_model_and_another_parameter_are_not_found(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    assert found(cache, "another") is None
    assert found(begun(tmp_path, b"another model")) is None


def test_its_digest_tells_names_types_shapes_and_bytes() -> None:
    values = torch.zeros(4, dtype=torch.uint8)
    same = {"values": values, "scales": values.clone()}
    others: list[dict[str, torch.Tensor]] = [
        {"values": values},
        {"values": values, "other": values},
        same | {"values": values.view(2, 2)},
        same | {"values": values.view(torch.int8)},
        same | {"values": values + 1},
    ]
    assert len({digest_of(each) for each in (same, *others)}) == 1 + len(others)
    assert digest_of(dict(reversed(same.items()))) == digest_of(same)


@pytest.mark.parametrize("damage", ["cut off", "empty", "another byte", "another header", "no digest"])
def test_a_damaged_file_is_not_used_and_is_said_once(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept(tmp_path)
    path = file_of(tmp_path)
    content = path.read_bytes()
    spoilt = {
        "cut off": content[:-1],
        "empty": b"",
        "another byte": content[:-1] + bytes([content[-1] ^ 1]),
        "another header": content.replace(b'"U8"', b'"I8"'),
        "no digest": content.replace(b'"blake3"', b'"blake2"'),
    }
    path.write_bytes(spoilt[damage])
    cache = begun(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert found(cache) is None
        assert found(cache) is None
    (line,) = caplog.messages
    assert line.startswith(f"{path} is damaged (")
    assert line.endswith("its parameter comes from the source")
    cache.keep(NAME, PARTS, DIGEST)
    assert found(cache) is not None


def test_a_file_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    def refuse(parts: Mapping[str, torch.Tensor], digest: bytes) -> None:
        raise ValueError("other shapes")

    assert kept(tmp_path).find(NAME, refuse) is None


def test_one_thread_at_a_time_reads_a_parameter(tmp_path: Path) -> None:
    first, second = begun(tmp_path), begun(tmp_path)
    reads, at_work = list[str](), threading.Event()

    def read(cache: FrozenCache) -> None:
        with cache.turn(NAME, lambda: True):
            at_work.set()
            if found(cache) is None:
                reads.append("from the source")
                cache.keep(NAME, PARTS, DIGEST)

    with first.turn(NAME, lambda: True):
        other = threading.Thread(target=read, args=(second,))
        other.start()
        assert not at_work.wait(0.2)
        with first.turn("another", lambda: True):
            first.keep(NAME, PARTS, DIGEST)
    other.join()
    assert at_work.is_set()
    assert not reads


def test_a_node_that_stops_waits_for_nobody(tmp_path: Path) -> None:
    cache = begun(tmp_path)
    with (
        cache.turn(NAME, lambda: True),
        pytest.raises(ValueError, match="this node is stopping"),
        cache.turn(NAME, lambda: False),
    ):
        pass


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    path = file_of(tmp_path)
    path.unlink()
    left = path.with_name(f"{path.stem}-abcd.part")
    left.write_bytes(b"half")
    cache.keep(NAME, PARTS, DIGEST)
    assert found(cache) is not None
    assert not left.exists()


def test_unused_models_go_the_oldest_first(tmp_path: Path) -> None:
    caches = [kept(tmp_path, b"%d" % number) for number in range(MOST_UNUSED + 3)]
    for number, cache in enumerate(caches):
        os.utime(cache._folder, (number, time.time() - 1000 + number))
    used = caches[0]
    of_others = [cache._folder for cache in caches[1:]]
    del caches, cache
    gc.collect()
    begun(tmp_path, b"0")
    assert [each.exists() for each in of_others] == [False, False] + [True] * MOST_UNUSED
    assert found(used) is not None


def test_after_some_days_an_unused_model_goes(tmp_path: Path) -> None:
    folder = kept(tmp_path)._folder
    gc.collect()
    os.utime(folder, (0, time.time() - UNUSED_SECONDS - 1))
    begun(tmp_path, b"another model")
    assert not folder.exists()


def test_a_model_that_a_process_uses_stays(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    os.utime(cache._folder, (0, 0))
    begun(tmp_path, b"another model")
    assert found(cache) is not None


def test_nothing_but_its_own_folders_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_space(monkeypatch, 0)  # all that is unused is to go
    strange = tmp_path / "notes"
    strange.mkdir()
    linked = tmp_path / ("a" * 32)
    linked.symlink_to(strange, target_is_directory=True)
    begun(tmp_path)
    assert strange.is_dir()
    assert linked.is_symlink()


def test_it_takes_no_more_of_the_disk_than_it_leaves_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_space(monkeypatch, 2 * SIZE - 1)
    cache = begun(tmp_path)
    with caplog.at_level(logging.WARNING):
        for name in ("first", "second"):
            cache.keep(name, PARTS, DIGEST)
    assert caplog.messages == [f"no more frozen weights are kept in {tmp_path}: its disk has too little free space"]
    assert not list(tmp_path.glob("*/*.safetensors"))
    free_space(monkeypatch, 2 * SIZE)
    cache.begin({NAME: SIZE})
    cache.keep(NAME, PARTS, DIGEST)
    assert found(cache) is not None


def test_other_models_make_room_if_it_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_others = [kept(tmp_path, b"%d" % number)._folder for number in range(2)]
    gc.collect()
    for number, folder in enumerate(of_others):
        os.utime(folder, (0, time.time() - 100 + number))
    each = sum(file.stat().st_size for file in of_others[0].iterdir())
    free_space(monkeypatch, 2 * SIZE + each)
    cache = begun(tmp_path)
    assert [folder.exists() for folder in of_others] == [False, True]
    cache.keep(NAME, PARTS, DIGEST)
    assert found(cache) is not None


def test_a_full_disk_is_only_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    cache = begun(tmp_path)
    monkeypatch.setattr(frozen_cache, "save_file", full)
    with caplog.at_level(logging.WARNING):
        for name in ("first", "second"):
            cache.keep(name, PARTS, DIGEST)
    assert caplog.messages == [f"no more frozen weights are kept in {tmp_path}: [Errno 28] No space left on device"]
    assert not [each for each in tmp_path.glob("*/*") if each.suffix in (".part", ".safetensors")]


def test_a_folder_that_cannot_be_used_is_only_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "a file"
    root.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        cache = begun(root)
        with cache.turn(NAME, lambda: True):
            assert found(cache) is None
            cache.keep(NAME, PARTS, DIGEST)
    (line,) = caplog.messages
    assert line.startswith("frozen weights are not kept on this machine's disk: cannot lock ")
