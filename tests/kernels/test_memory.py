"""Memory is used again when nothing uses it, and not before."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import torch

from dtfm.kernels.codec import Codec, decode, encode
from dtfm.kernels.memory import MEMORY, SMALLEST_BYTES, Memory, give_back

MIB = 1 << 20


def address(array: np.typing.NDArray[np.uint8]) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    memory = Memory()
    first = memory.take(4 * MIB)
    at = address(first)
    view = first.data[5:]
    del first
    assert address(memory.take(4 * MIB)) != at
    del view
    assert at in (address(memory.take(4 * MIB)), address(memory.take(4 * MIB)))


def test_a_tensor_that_views_memory_keeps_it() -> None:
    memory = Memory()
    held = memory.take(4 * MIB)
    held[:] = 1
    tensor = torch.frombuffer(held.data, dtype=torch.float32)[7:]
    del held
    memory.take(4 * MIB)[:] = 2
    assert torch.all(tensor.view(torch.uint8) == 1)
    assert memory.free_bytes == 4 * MIB
    del tensor
    assert memory.free_bytes == 8 * MIB


def test_no_more_is_kept_than_asked_for_and_the_longest_unused_goes_first() -> None:
    memory = Memory(kept=10 * MIB)
    blocks = [memory.take(size * MIB) for size in (4, 5, 6)]
    last = address(blocks[2])
    while blocks:
        del blocks[0]
    assert memory.free_bytes == 6 * MIB
    assert address(memory.take(6 * MIB)) == last
    del blocks
    too_large = memory.take(11 * MIB)
    del too_large
    assert memory.free_bytes == 0


def test_a_block_serves_what_is_at_least_half_its_size() -> None:
    memory = Memory()
    at = address(memory.take(8 * MIB))
    assert address(memory.take(4 * MIB - 1)) != at
    smaller = memory.take(4 * MIB)
    assert (address(smaller), smaller.nbytes) == (at, 4 * MIB)


def test_small_pieces_are_left_to_the_allocator() -> None:
    memory = Memory()
    memory.take(SMALLEST_BYTES - 1)
    assert memory.free_bytes == 0


def test_from_many_threads_nobody_gets_what_another_still_uses() -> None:
    memory = Memory()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            mine = memory.take(MIB)
            mine[:1000] = number
            if np.any(mine[:1000] != number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.free_bytes <= 2 * 4 * MIB  # each holds one while it takes the next


def test_blocks_that_come_back_while_one_is_taken_do_not_change_which_one_it_is() -> None:
    """Garbage collection may end a loan anywhere, here in the comparison of sizes while a block is looked for."""
    memory = Memory(kept=12 * MIB)
    blocks = [memory.take(size * MIB) for size in (7, 3, 2)]
    held = [memory.take(8 * MIB)]
    while blocks:
        del blocks[0]

    class Size(int):
        def __le__(self, other: int) -> bool:
            held.clear()
            return int(self) <= other

    assert memory.take(Size(6 * MIB)).nbytes == 6 * MIB
    assert memory.free_bytes <= 12 * MIB


def test_codecs_use_it_both_ways() -> None:
    x = torch.linspace(-1, 1, 2 * MIB)
    encoded = encode(Codec.I8B256, x)
    decoded = decode(encoded.codec, encoded.data, x.numel(), x.dtype, x.device)
    kept = decoded.clone()
    encode(Codec.I8B256, -x)
    decode(encoded.codec, encoded.data, x.numel(), x.dtype, x.device)
    assert torch.equal(decoded, kept)
    del encoded, decoded
    assert MEMORY.free_bytes >= x.nbytes


def test_freed_memory_is_given_back_but_seldom() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def fill_and_free() -> None:
        pieces = [torch.ones(MIB // 8) for _ in range(256)]
        del pieces[::2]  # holes between used blocks, so that the heap's end cannot go back
        held.extend(pieces)

    held: list[torch.Tensor] = []
    block = MEMORY.take(4 * MIB)
    del block
    fill_and_free()
    before = resident()
    assert give_back(now=True)
    assert MEMORY.free_bytes == 0
    assert resident() < before - 32 * MIB
    fill_and_free()
    assert not give_back(), "it has just been done"


def test_memory_of_a_step_is_kept_for_the_next_until_steps_use_less() -> None:
    now = 0.0
    memory = Memory(kept=2 * MIB, remembered=100.0, clock=lambda: now)

    def step(blocks: int) -> set[int]:
        used = [memory.take(2 * MIB) for _ in range(blocks)]
        return {address(block) for block in used}

    first = step(5)
    assert memory.free_bytes == 10 * MIB
    assert step(5) == first
    now = 150.0
    step(1)
    assert memory.free_bytes == 10 * MIB, "a step as before may follow"
    now = 260.0
    step(1)
    step(1)
    assert memory.free_bytes == 2 * MIB


def test_no_more_is_kept_than_was_in_use_at_a_time() -> None:
    memory = Memory(kept=2 * MIB, remembered=100.0, clock=lambda: 0.0)
    blocks = [memory.take(4 * MIB), memory.take(4 * MIB)]
    blocks.clear()
    large = memory.take(10 * MIB)  # none of the two is large enough for it
    assert memory.free_bytes <= 2 * MIB
    del large
    assert memory.free_bytes == 10 * MIB
