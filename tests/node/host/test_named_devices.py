"""What --device names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtfm.node.host import named_devices
from dtfm.node.host.named_devices import devices_named, gpus_here, see_only, slots

UUID, SLICE = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0"


def test_all_names_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_devices, "_count_gpus", lambda: 3)
    assert devices_named("all") == ("cuda:0", "cuda:1", "cuda:2")


def test_all_explains_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_devices, "_count_gpus", lambda: 0)
    with pytest.raises(ValueError, match=r"--device all: PyTorch .* sees no GPU .*--device cpu"):
        devices_named("all")


def test_devices_may_be_listed() -> None:
    assert devices_named("cuda:2, cuda:0") == ("cuda:2", "cuda:0")
    assert devices_named("auto") == ("auto",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("cuda:0,cuda:0", "cuda:0 is there twice"),
        ("cuda:0,all", "'all' cannot be one of several"),
        ("gpu", "there is no device 'gpu': give auto, all, cpu, cuda or cuda:N"),
        ("cpu,", "'' cannot be one of several"),
        (",".join(["cpu"] * 33), "33 devices are more than 32"),
    ],
)
def test_a_list_that_cannot_be_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        devices_named(text)


def test_each_device_has_a_slot_of_its_own_the_same_at_every_start() -> None:
    assert slots(["cuda:0", "cuda:11", "cpu", "cpu"]) == ["cuda0", "cuda11", "cpu", "cpu2"]


@pytest.mark.parametrize(
    ("outer", "name", "visible", "called"),
    [
        (None, "cuda:1", "1", "cuda:0"),
        ("3,1", "cuda:1", "1", "cuda:0"),
        ("3,1", "cuda:0", "3", "cuda:0"),
        (f"{UUID}, {SLICE}", "cuda:1", SLICE, "cuda:0"),
        ("3,1", "cuda:2", "3,1", "cuda:2"),
        ("3,-1,2", "cuda:1", "3,-1,2", "cuda:1"),
        ("", "cuda:0", "", "cuda:0"),
        ("3,1", "cuda", "3,1", "cuda"),
        ("3,1", "auto", "3,1", "auto"),
        ("3,1", "cpu", "3,1", "cpu"),
    ],
)
def test_a_process_sees_its_own_gpu_alone(
    outer: str | None, name: str, visible: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is None:
        monkeypatch.setattr(named_devices, "gpus_here", lambda: None)  # as in WSL
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer or "") if outer is not None else None
    assert see_only(name) == called
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_gpus_are_counted_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_here(tmp_path) is None
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_here(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus_here(tmp_path) == 1
