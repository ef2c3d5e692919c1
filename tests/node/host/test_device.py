"""What a device must be able to do for a run."""

from __future__ import annotations

import pytest
import torch

from dtfm.node.host.device import check_bf16

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("capability", "can"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)])
def test_a_gpu_without_bfloat16_is_refused_and_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], can: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    if can:
        check_bf16(GPU)
        return
    with pytest.raises(ValueError, match=r"Tesla T4 \(compute capability 7\.5\) cannot: .*precision = \"fp32\""):
        check_bf16(GPU)


def test_every_cpu_computes_in_bfloat16() -> None:
    check_bf16(torch.device("cpu"))
