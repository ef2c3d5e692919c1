"""Copies to the host, and the pinned memory that they take."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtfm.kernels import transfer
from dtfm.kernels.memory import Memory
from dtfm.kernels.transfer import arriving, page_locked, to_host


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By address, the bytes that are pinned now. The driver is a fake one that pins nothing."""
    now: dict[int, int] = {}
    driver = SimpleNamespace(
        cudaHostRegister=lambda at, size, _: now.update({at: size}) or 0, cudaHostUnregister=now.pop
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    return now


def test_pinned_memory_is_whole_pages_of_its_own_and_is_pinned_no_more_once_nothing_refers_to_it(
    pinned: dict[int, int],
) -> None:
    size = (3 << 20) + 4
    block = page_locked(size)
    assert pinned == {block.ctypes.data: size}
    assert block.ctypes.data % 4096 == 0
    block[:] = 1
    del block
    gc.collect()
    assert not pinned


def test_pinned_memory_is_used_again_and_only_so_much_of_it_is_kept(pinned: dict[int, int]) -> None:
    memory = Memory(4 << 20, page_locked)
    first, second = memory.take(3 << 20), memory.take(3 << 20)
    at = first.ctypes.data
    del first
    assert memory.take(3 << 20).ctypes.data == at
    del second
    gc.collect()
    assert sum(pinned.values()) == 3 << 20


def test_memory_that_cuda_does_not_pin_is_used_unpinned_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, last_error: list[str]
) -> None:
    """As in WSL 2. CUDA keeps the error until somebody asks for it, and would blame the next kernel."""
    refuses = SimpleNamespace(cudaHostRegister=lambda *_: 801, cudaHostUnregister=None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refuses)
    transfer._say_once.cache_clear()
    for _ in range(2):
        block = page_locked(3 << 20)
        block[:] = 7
        del block
        gc.collect()
    assert caplog.text.count("CUDA pins no memory of the host here (CUDA error 801)") == 1
    assert last_error == ["libcudart.so.13"] * 2


@pytest.fixture
def last_error(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runtimes that were asked for their last error; the one for CUDA 13 is loaded."""
    asked: list[str] = []

    def load(name: str, mode: int) -> SimpleNamespace:
        assert mode == 4
        if name != "libcudart.so.13":
            raise OSError(name)
        return SimpleNamespace(cudaGetLastError=lambda: asked.append(name))

    monkeypatch.setattr(ctypes, "CDLL", load)
    return asked


def test_small_pieces_are_not_pinned_where_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refused(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: operation not supported\nFor debugging ...")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refused)
    assert transfer.pinned(5).shape == (5,)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_a_copy_has_the_values_from_its_beginning(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    arrived, copied = arriving(x), to_host(x)
    x.zero_()
    assert torch.equal(arrived(), torch.ones(shape))
    assert torch.equal(copied, torch.ones(shape))
