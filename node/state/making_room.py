"""Making room for a stage for which a node has no memory beside the one that it holds (scheduler/cost/room.py).

What the plan before needed, and the next one does not, goes out of the way before anything is loaded: the state that others may
fetch from here goes to the host's memory, or to a file without a name on this node's disk; all else is dropped. The file is
mapped to memory, so that its state is donated and digested like any other, until the switch is over.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Collection
from enum import Enum

import torch

from dtfm.kernels.memory import give_back
from dtfm.node.model.bucket import HOST, Bucket, bucket_bytes
from dtfm.node.state.images import Scratch
from dtfm.node.state.state_store import StateStore

log = logging.getLogger(__name__)


class Aside(Enum):
    """Where state was moved."""

    HOST = "the host's memory"
    DISK = "the disk"


def make_room(
    store: StateStore,
    *,
    needed: Collection[int],
    expected: Collection[int],
    placed: Callable[[Bucket], Bucket],
    host_bytes: int,
    scratch: Scratch,
) -> dict[Aside, int]:
    """Moves the buckets of ``store`` out of the way that are not ``needed`` here, and puts the others where the next stage wants
    them (``placed``). Buckets whose state nobody has ``expected`` here are dropped, as are all gradients. Returns the bytes that
    went where.

    ``host_bytes`` is what may be moved to the host's memory; below 0, what is there moves to the disk. Raises OSError if the disk
    has no room.
    """
    moved = dict.fromkeys(Aside, 0)
    held = store.held.buckets
    order = sorted(held, key=lambda index: index in needed)
    del held  # or it would keep what is moved
    for index in order:
        bucket = store.held.buckets[index]
        bucket.forget_gradients()
        if index not in expected:
            store.move(bucket, None)
        elif index in needed:
            store.move(bucket, placed(bucket))
        elif bucket.home != HOST or host_bytes < 0:
            size = bucket_bytes(bucket.spec, bucket.parameters.dtype)
            where = Aside.HOST if size + moved[Aside.HOST] <= host_bytes else Aside.DISK
            store.move(bucket, bucket.set_aside(_in_host if where is Aside.HOST else _on_disk(scratch)))
            moved[where] += size
        del bucket
    give_back(now=True)
    told = [f"{size / 2**20:,.0f} MiB to {where.value}" for where, size in moved.items() if size]
    log.info("made room for the next stage: moved %s", " and ".join(told) or "nothing")
    return moved


def _in_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(HOST, copy=True)


def _on_disk(scratch: Scratch) -> Callable[[torch.Tensor], torch.Tensor]:
    def written(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, on the CPU, in a file that is mapped: its pages are the kernel's to keep or to drop."""
        if not tensor.nbytes:
            return tensor.to(HOST, copy=True)
        with scratch(tensor.nbytes) as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a full disk is an error now, not a signal later
            pages = mmap.mmap(file.fileno(), tensor.nbytes)
        copy = torch.frombuffer(pages, dtype=tensor.dtype)
        copy.copy_(tensor)
        pages.flush()
        pages.madvise(mmap.MADV_DONTNEED)
        return copy

    return written
