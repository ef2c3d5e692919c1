"""What the coordinator has this node copy in advance, as its wishes change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from dtfm.node.bucket import Bucket, BucketSpec
from dtfm.node.following import Copied, Following
from dtfm.node.model import Model
from dtfm.node.profile import run_dtype
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
        following = self._following
        if following is not None and following.sound and following.buckets == {spec.index for spec in donors}:
            following.tell_instead(tell)
            return
        await self.stop()
        if donors:
            self._following = Following(run, self._device, run_dtype(run), donors, identity, tell)
        else:
            tell(Copied(0))  # all that is wanted is trained here

    async def take(self, commit: Commit, patience: float) -> Mapping[int, Bucket]:
        """What was copied and is as of after the last ``commit``; what is on its way is waited for. The copying ends."""
        following, self._following = self._following, None
        if following is None:
            return {}
        copied = await following.at(commit, patience)
        await following.close()
        log.info("%d of %d buckets were copied in advance", len(copied), len(following.buckets))
        return copied

    async def stop(self) -> None:
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
