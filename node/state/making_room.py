"""Making room for a new stage, where a node's memory is too small for the old stage and the new one (scheduler/cost/room.py).

Before it loads anything, the node clears what only the old plan needed. State that others may fetch from here moves to the
host's memory, or to a file on this node's disk. All else is dropped. The file has no name and is mapped to memory, so that the
node donates and digests its state as usual until the switch is over.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Collection
from enum import Enum

import torch

from dtfm.kernels.memory import give_back
from dtfm.node.data.shared.storage import PIECE_BYTES
from dtfm.node.host.work import WORK
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

    At most ``host_bytes`` move to the host's memory. Below 0, state that lies there moves to the disk. Raises OSError if the disk
    has no room.
    """
    moved = dict.fromkeys(Aside, 0)
    held = store.held.buckets
    order = sorted(held, key=lambda index: index in needed)
    del held  # it refers to all buckets
    for index in order:
        bucket = store.held.buckets[index]
        bucket.forget_gradients()
        WORK.did()
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
        """A copy on the CPU, mapped from a file: its pages are in memory only while somebody reads them."""
        data = tensor.view(torch.uint8)
        if not len(data):
            return tensor.to(HOST, copy=True)
        with scratch(len(data)) as file:
            for piece in torch.split(data, PIECE_BYTES):
                file.write(piece.to(HOST).numpy().data)
                WORK.did()
            file.flush()
            pages = mmap.mmap(file.fileno(), len(data), access=mmap.ACCESS_COPY)
        return torch.frombuffer(pages, dtype=tensor.dtype)

    return written
