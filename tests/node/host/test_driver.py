"""A GPU that is in the machine is used, or its owner is told why it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtfm.installed import torch_line
from dtfm.node.host import device
from dtfm.node.host.driver import Driver, has_nvidia_gpu, line_for, nvidia_driver

NVIDIA, INTEL = "0x10de", "0x8086"


def test_the_driver_is_what_the_kernel_says(tmp_path: Path) -> None:
    said = tmp_path / "version"
    assert nvidia_driver(said) is None
    said.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC version: 12.2.0"
    )
    driver = nvidia_driver(said)
    assert driver is not None
    assert driver.version == "580.82.07"


def on_the_bus(root: Path, vendor: str, kind: str) -> None:
    slot = root / "sys/bus/pci/devices/0000:01:00.0"
    slot.mkdir(parents=True)
    (slot / "vendor").write_text(f"{vendor}\n")
    (slot / "class").write_text(f"{kind}\n")


@pytest.mark.parametrize(
    ("vendor", "kind", "is_one"),
    [(NVIDIA, "0x030000", True), (NVIDIA, "0x030200", True), (NVIDIA, "0x040300", False), (INTEL, "0x030000", False)],
    ids=["graphics", "compute", "its sound", "another maker's"],
)
def test_the_bus_shows_a_gpu_without_a_driver(vendor: str, kind: str, is_one: bool, tmp_path: Path) -> None:
    on_the_bus(tmp_path, vendor, kind)
    assert has_nvidia_gpu(tmp_path) is is_one


@pytest.mark.parametrize("sign", ["proc/driver/nvidia/gpus/0000:01:00.0", "dev/nvidia0"])
def test_the_driver_shows_a_gpu_where_the_bus_is_hidden(sign: str, tmp_path: Path) -> None:
    assert not has_nvidia_gpu(tmp_path)
    (tmp_path / sign).mkdir(parents=True)
    assert has_nvidia_gpu(tmp_path)


@pytest.fixture
def gpu_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, whose PyTorch is newer than its driver."""
    monkeypatch.setattr(device, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(device, "nvidia_driver", lambda: Driver("550.54", (12, 4)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_auto_takes_no_cpu_in_place_of_a_gpu_that_is_there(gpu_out_of_reach: None) -> None:
    with pytest.raises(
        ValueError, match=r"driver 550\.54 runs CUDA up to 12\.4, but PyTorch .*, built for CUDA 13\.0"
    ) as refused:
        device.open_device("auto")
    assert torch_line("gpu", again=True) in str(refused.value)
    assert "--device cpu works without it" in str(refused.value)
    assert device.open_device("cpu").type == "cpu"


def test_auto_takes_the_cpu_where_no_gpu_is(gpu_out_of_reach: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_nvidia_gpu", lambda: False)
    assert device.open_device("auto").type == "cpu"


@pytest.mark.parametrize(
    ("driver", "torch_here", "built_for", "extra", "again"),
    [
        (None, False, None, "node", False),
        (Driver("550.54.14", (12, 4)), False, None, "gpu", False),
        (Driver("550.54.14", (12, 4)), True, "13.0", "gpu", True),
        (Driver("570.86.10", (12, 8)), True, "12.9", "gpu", False),
        (Driver("580.65.06", (13, 0)), True, "13.2", "gpu", False),
        (Driver("580.65.06", (13, 0)), True, None, "gpu", True),
    ],
    ids=[
        "no GPU",
        "12.4",
        "12.4, PyTorch for 13",
        "12.8, PyTorch for 12.9",
        "13.0, PyTorch for 13.2",
        "PyTorch for the CPU",
    ],
)
def test_a_build_of_pytorch_is_replaced_only_where_the_driver_cannot_run_it(
    driver: Driver | None, torch_here: bool, built_for: str | None, extra: str, again: bool
) -> None:
    line, why = line_for(driver, driver is not None, torch_here, built_for)
    assert line == torch_line(extra, again=again)
    assert (driver is None) == ("CPU" in why)


def test_no_line_is_printed_for_a_driver_that_no_build_runs_under() -> None:
    with pytest.raises(ValueError, match=r"driver 470\.57.*CUDA 12; update NVIDIA's driver to 525"):
        line_for(Driver("470.57", (11, 4)), True, False, None)
    with pytest.raises(ValueError, match="no driver: install it"):
        line_for(None, True, False, None)
