"""Frozen layers that this node cannot read from their source: other nodes that hold them give them, as they give buckets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from dtfm.node.model.frozen import FrozenWeights
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.precision import compute_dtype
from dtfm.node.state.transfer import Wanted, fetch
from dtfm.protos.control_pb2 import FrozenLayer, Peer

log = logging.getLogger(__name__)


async def hold_frozen(
    loaded: LoadedRun,
    layers: tuple[int, int],
    offered: Iterable[FrozenLayer],
    peers: Iterable[Peer],
    most_bytes: int | None = None,
) -> None:
    """Reads the missing frozen weights of the ``layers`` into the host's memory, at most about ``most_bytes``. If their source
    cannot be read, those that others have ``offered`` come from these ``peers``. Raises the source's error if nobody gives
    them."""
    frozen, dtype = loaded.model.frozen, compute_dtype(loaded.run)
    try:
        await asyncio.to_thread(frozen.load, *layers, dtype, most_bytes)
        return
    except ValueError as problem:
        addresses, missing = {peer.node: peer for peer in peers}, frozen.missing(*layers, dtype, most_bytes)
        wanted = [
            _wanted(frozen, each, frozen.layer_bytes(each.layer, dtype), donors)
            for each in offered
            if each.layer in missing and (donors := [addresses[name] for name in each.nodes if name in addresses])
        ]
        if not wanted:
            raise
        log.warning("%s; asking other nodes for frozen layers %s", problem, [each.bucket for each in wanted])
        try:
            gave = await fetch(wanted, 0, 0, loaded.dialler, loaded.run.lease_seconds)
        except (ConnectionError, ValueError) as refused:  # the source is at fault, not the donors
            log.warning("%s", refused)
            raise problem from None
    for layer, givers in sorted(gave.items()):
        log.info("got the frozen weights of layer %d from %s", layer, " and ".join(givers))
    await asyncio.to_thread(frozen.load, *layers, dtype, most_bytes)


def _wanted(frozen: FrozenWeights, offered: FrozenLayer, size: int, donors: list[Peer]) -> Wanted:
    arriving = _Arriving(size)
    finish = partial(arriving.finish, frozen, offered)
    return Wanted(offered.layer, size, donors, arriving.take, finish, frozen=True)


class _Arriving:
    """The bytes of a layer. They take memory from the first one on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._content = bytearray()

    def take(self, piece: memoryview, offset: int) -> None:
        if not self._content:
            self._content = bytearray(self._size)
        self._content[offset : offset + len(piece)] = piece

    def finish(self, frozen: FrozenWeights, offered: FrozenLayer) -> str:
        content, self._content = self._content, bytearray()
        if frozen.take(offered.layer, memoryview(content), offered.digest):
            return ""
        return f"its frozen weights of layer {offered.layer} are not those that the coordinator has named"
