"""What a device must be able to do for a run, and what it is called."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from dtfm.node.host import device as device_module
from dtfm.node.host.device import MOST_NAME, check_bf16, cpu_name, has_bf16, measure_device, why_slow_in_fp32

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("capability", "can"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)])
def test_a_gpu_without_bfloat16_is_refused_and_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], can: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    assert has_bf16(GPU) == can
    assert ("computes in fp32" in why_slow_in_fp32(GPU)) is not can
    measured_in: list[torch.dtype] = []

    def measure_flops(_: torch.device, dtype: torch.dtype) -> float:
        measured_in.append(dtype)
        return 1.0

    monkeypatch.setattr(device_module, "measure_flops", measure_flops)
    monkeypatch.setattr(device_module, "free_memory", lambda _: 8 << 30)
    shares = [measure_device(GPU, gpus).host_memory_bytes for gpus in (1, 4)]
    assert measured_in == 2 * [torch.bfloat16 if can else torch.float32]
    assert shares[0] == 4 * shares[1]
    if can:
        check_bf16(GPU)
        return
    with pytest.raises(ValueError, match=r"Tesla T4 \(compute capability 7\.5\) cannot: .*precision = \"fp32\""):
        check_bf16(GPU)


def test_a_cpu_may_compute_in_bfloat16_but_is_no_reason_to() -> None:
    check_bf16(torch.device("cpu"))
    assert not has_bf16(torch.device("cpu"))


def named(folder: Path, cpuinfo: str) -> str:
    (folder / "cpuinfo").write_text(cpuinfo)
    return cpu_name(folder / "cpuinfo")


def test_a_cpu_is_called_by_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    first = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)  CPU @ 2.20GHz \nflags\t\t: fpu vme\n"
    assert named(tmp_path, f"{first}\n{first.replace('Xeon', 'another')}") == "Intel(R) Xeon(R) CPU @ 2.20GHz"
    arm = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    assert named(tmp_path, arm) == "aarch64 CPU implementer 0x41 CPU part 0xd0c"


@pytest.mark.parametrize("cpuinfo", ["", "\n\n", "no colon", "model name :   \n", "model name : \x00\x07\n"])
def test_where_the_system_does_not_tell_it_is_called_by_its_architecture(
    cpuinfo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert named(tmp_path, cpuinfo) == "riscv64"
    assert cpu_name(tmp_path / "none") == "riscv64"


def test_the_name_is_short_and_printable_whatever_a_hypervisor_says(tmp_path: Path) -> None:
    name = named(tmp_path, f"model name : \x1b[31ma\u202e\u00fc{'x' * 1000}\n")
    assert name.startswith("[31ma xx")
    assert len(name) == MOST_NAME
    assert name.isprintable()


def test_a_nodes_device_has_that_name() -> None:
    device = measure_device(torch.device("cpu"))
    assert (device.kind, device.name) == ("cpu", cpu_name())
