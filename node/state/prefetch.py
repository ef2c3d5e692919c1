"""What the coordinator has this node copy in advance, as its wishes change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.model.model import Model
from dtfm.node.model.workload import run_dtype
from dtfm.node.state.standby import Copied, Following
from dtfm.protos.control_pb2 import Commit, NodeMessage, Peer, Prefetch, Prefetched
from dtfm.protos.credentials import Identity
from dtfm.protos.plan_pb2 import Run

log = logging.getLogger(__name__)


class Copier:
    """On one event loop. ``report`` takes a message for the coordinator."""

    def __init__(self, node: str, device: torch.device, report: Callable[[NodeMessage], None]) -> None:
        self._node = node
        self._device = device
        self._report = report
        self._following: Following | None = None
        self._one_at_a_time = asyncio.Lock()

    async def copy(
        self, run: Run, model: Model, identity: Identity, wanted: Prefetch, trained: Collection[int]
    ) -> None:
        """Starts to copy what is wanted but for the buckets ``trained`` here; reports Prefetched after every step that is
        caught up with."""

        def tell(copied: Copied) -> None:
            problem = copied.problem[:1000]
            prefetched = Prefetched(number=wanted.number, step=copied.step, voted=copied.voted, problem=problem)
            self._report(NodeMessage(prefetched=prefetched))

        donors = donors_of(wanted, model.buckets, self._node)
        for index in trained:
            donors.pop(model.buckets[index], None)
        async with self._one_at_a_time:
            if self._following is not None and self._following.serves(donors):
                self._following.tell_instead(tell)
                return
            await self._end()
            if not donors:
                tell(Copied(0))  # all that is wanted is trained here
                return
            try:
                self._following = Following(run, self._device, run_dtype(run), donors, identity, tell)
            except Exception as error:  # out of memory, say: the coordinator waits for an answer
                log.exception(
                    "the state of layers %d-%d cannot be copied", wanted.first_layer, wanted.past_last_layer - 1
                )
                tell(Copied(0, problem=f"{type(error).__name__}: {error}"))

    async def take(self, commit: Commit, patience: float) -> Mapping[int, Bucket]:
        """What was copied and is as of after the last ``commit``; what is on its way is waited for. The copying ends, unless this
        is cancelled."""
        async with self._one_at_a_time:
            following = self._following
            if following is None:
                return {}
            copied = await following.at(commit, patience)
            await self._end()
        log.info("%d of %d buckets were copied in advance", len(copied), following.size)
        return copied

    async def stop(self) -> None:
        async with self._one_at_a_time:
            await self._end()

    async def _end(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            await following.close()


def donors_of(wanted: Prefetch, buckets: Iterable[BucketSpec], node: str) -> dict[BucketSpec, list[Peer]]:
    """For each of the ``buckets`` that the wanted layers use: who has it, other than ``node``."""
    addresses = {peer.node: peer for peer in wanted.peers}
    layers = range(wanted.first_layer, wanted.past_last_layer)
    donors = {}
    for spec in buckets:
        if any(layer in layers for layer in spec.layers):
            known = (layer for layer in spec.layers if layer < len(wanted.donors))
            names = dict.fromkeys(name for layer in known for name in wanted.donors[layer].nodes if name != node)
            donors[spec] = [addresses[name] for name in names if name in addresses]
    return donors
