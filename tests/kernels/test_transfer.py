"""Copies to the host, and the pinned memory that they take."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from dtfm.kernels.memory import Memory
from dtfm.kernels.transfer import arriving, page_locked, to_host


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By address, the bytes that are pinned now, by a driver that pins nothing."""
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


def test_a_driver_that_refuses_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(code: int) -> None:
        assert code == 2
        raise MemoryError

    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=None)
    )
    monkeypatch.setattr(torch.cuda, "check_error", refused)
    with pytest.raises(MemoryError):
        page_locked(1 << 20)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_a_copy_is_of_what_was_there_when_it_began(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    arrived, copied = arriving(x), to_host(x)
    x.zero_()
    assert torch.equal(arrived(), torch.ones(shape))
    assert torch.equal(copied, torch.ones(shape))
