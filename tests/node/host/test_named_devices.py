"""What --device names."""

from __future__ import annotations

import pytest

from dtfm.node.host import named_devices
from dtfm.node.host.named_devices import devices_named, slots


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
