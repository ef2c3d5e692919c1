"""From facts to findings: what is wrong is named with the user's own values, and so is the fix."""

from __future__ import annotations

import pytest

from dtfm.installed import torch_line
from dtfm.node.doctor import findings as f
from dtfm.node.doctor.findings import Finding
from dtfm.node.host.driver import Driver, judge

TWELVE = Driver("550.54.15", (12, 4))


@pytest.mark.parametrize(
    ("driver", "built_for", "gpus", "good", "finding", "fix"),
    [
        (None, None, 0, True, "none is needed", ""),
        (None, "12.8", 0, None, "no NVIDIA driver", "--gpus all"),
        (TWELVE, None, 0, False, "the GPU lies idle", "[gpu]"),
        (Driver("580.82", (13, 0)), None, 0, False, "driver 580.82 runs CUDA up to 13.0", "[gpu]"),
        (Driver("470.57", (11, 4)), "12.8", 1, False, "they need CUDA 12", "update NVIDIA's driver"),
        (Driver("520.61.05", None), "12.8", 1, False, "they need CUDA 12", "525.60.13 or newer"),
        (Driver("525.60.13", None), "12.8", 1, True, "sees 1 GPUs", ""),
        (Driver("600.1", (14, 1)), None, 0, False, "up to 14.1", "[gpu]"),
        (TWELVE, "13.0", 0, False, "up to 12.4, but PyTorch 2.9, built for CUDA 13.0", "[gpu]"),
        (TWELVE, "12.8", 0, False, "sees no GPU", "nvidia-smi"),
        (TWELVE, "12.8", 2, True, "sees 2 GPUs", ""),
        (Driver("of unknown version", None), "12.8", 1, True, "driver of unknown version", ""),
    ],
)
def test_the_driver_must_run_the_cuda_that_pytorch_is_built_for(
    driver: Driver | None, built_for: str | None, gpus: int, good: bool | None, finding: str, fix: str
) -> None:
    found = Finding("driver", *judge(driver, driver is not None, "2.9", built_for, gpus))
    assert found.good is good
    assert finding in found.finding
    assert fix in found.fix


def test_a_gpu_without_a_driver_is_no_machine_without_a_gpu() -> None:
    found = Finding("driver", *judge(None, True, "2.9", None, 0))
    assert (found.good, "no driver" in found.finding, "install NVIDIA's driver" in found.fix) == (False, True, True)


def test_what_is_not_installed_is_named() -> None:
    found = f.on_packages(["torch"], {})
    assert (found.good, found.fix) == (False, torch_line("node"))
    assert f.on_packages(["torch"], {}, "gpu").fix == torch_line("gpu")
    assert f.on_packages([], {"torch": "2.9", "transformers": "5"}).finding == "torch 2.9, transformers 5"


def test_a_disk_is_full_or_slow_or_cannot_be_written() -> None:
    assert f.on_disk("/data", 10 << 30, 500e6).good
    full = f.on_disk("/data", 1 << 20, 500e6)
    assert (full.good, "0.0 GiB free in /data" in full.finding) == (False, True)
    slow = f.on_disk("/data", 10 << 30, 20e6)
    assert (slow.good, "written at 20 MB/s" in slow.finding) == (None, True)
    refused = f.on_disk("/data", 0, None, "Read-only file system")
    assert (refused.good, "--snapshots" in refused.fix) == (False, True)


@pytest.mark.parametrize(
    ("most", "good", "fix"), [(65536, True, ""), (1024, None, "LimitNOFILE=4096"), (128, False, "nofile=4096")]
)
def test_open_files_are_limited(most: int, good: bool | None, fix: str) -> None:
    found = f.on_open_files(most)
    assert found.good is good
    assert fix in found.fix


def test_small_buffers_bound_a_far_stream() -> None:
    small = f.on_tcp_buffers({"tcp_rmem": 4194304, "tcp_wmem": 33554432})
    assert small.good is None
    assert "336 Mbit/s" in small.finding
    assert "sysctl -w" in small.fix
    assert f.on_tcp_buffers({"tcp_rmem": 33554432, "tcp_wmem": 33554432}).good
    assert f.on_tcp_buffers(None).good is None


def test_bbr_copes_better_with_loss() -> None:
    assert f.on_congestion_control("bbr", ["bbr"]).good
    assert f.on_congestion_control("cubic", ["reno", "cubic", "bbr"]).fix.startswith("sysctl -w net.core")
    assert f.on_congestion_control("cubic", ["reno", "cubic"]).fix.startswith("modprobe tcp_bbr; sysctl")
    assert f.on_congestion_control("", []).good is None


@pytest.mark.parametrize(
    ("control", "slow", "good"), [("cubic", True, None), ("cubic", False, True), ("bbr", True, True)]
)
def test_connections_start_slowly_after_a_pause(control: str, slow: bool, good: bool | None) -> None:
    found = f.on_pauses(control, slow)
    assert found.good is good
    assert control in found.finding
    assert ("tcp_slow_start_after_idle=0" in found.fix) == (good is None)


def test_a_machine_behind_nat_without_a_public_candidate_needs_connections_lent() -> None:
    lan, public = "192.168.1.20:7401", "198.51.100.7:7401"
    assert f.on_being_behind_nat("192.168.1.20", [lan], behind_nat=False).good
    known = f.on_being_behind_nat("192.168.1.20", [lan, public], behind_nat=True)
    assert (known.good, public in known.finding) == (True, True)
    alone = f.on_being_behind_nat("192.168.1.20", [lan], behind_nat=True)
    assert alone.good is None
    assert "--advertise PUBLIC_IP:PORT" in alone.fix
