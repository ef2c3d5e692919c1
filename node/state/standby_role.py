"""Which layers this node is a standby for, as the coordinator's requests change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from dtfm.node.data.problems import sentence_of
from dtfm.node.model.bucket import HOST, Bucket, BucketSpec
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.precision import run_dtype
from dtfm.node.state.standby import StandbyCopies
from dtfm.protos.control_pb2 import Commit, NodeMessage, Peer, Standby, StandbyProgress
from dtfm.scheduler.model.rounds import Rounds

log = logging.getLogger(__name__)


class StandbyRole:
    """Lives on one event loop. ``report`` takes a message for the coordinator."""

    def __init__(self, node: str, report: Callable[[NodeMessage], None]) -> None:
        self._node = node
        self._report = report
        self._copies: StandbyCopies | None = None
        self.is_of_all = True
        """Whether what it was last asked to copy is all of the state, and not only what islands share."""
        self._one_at_a_time = asyncio.Lock()

    async def assume(self, loaded: LoadedRun, wanted: Standby, trained: Collection[int]) -> None:
        """Starts to copy the wanted layers, except the buckets ``trained`` here, and reports every step caught up with."""

        def tell(status: StandbyProgress) -> None:
            message = NodeMessage(standby_progress=status)
            message.standby_progress.number = wanted.number
            self._report(message)

        donors = donors_of(wanted, loaded.model.buckets, self._node)
        for index in trained:
            donors.pop(loaded.model.buckets[index], None)
        of = wanted.rounds
        counted = Rounds(of.since, of.steps, of.count, of.before, of.restarts), wanted.trained_before
        self.is_of_all = not wanted.rounds.count
        async with self._one_at_a_time:
            if self._copies is not None and self._copies.counted == counted and self._copies.serves(donors):
                self._copies.tell_instead(tell)
                return
            await self._end()
            if not donors:
                tell(StandbyProgress())  # everything wanted is trained here
                return
            try:
                dtype = run_dtype(loaded.run)
                # In a thread, because allocating this much memory takes a while.
                copied = await asyncio.to_thread(
                    lambda: [(Bucket(s, HOST, dtype), peers) for s, peers in donors.items()]
                )
                self._copies = StandbyCopies(loaded.run, copied, loaded.dialler, tell, counted)
            except Exception as error:  # out of memory, for one: the coordinator waits for an answer
                log.exception("layers %d-%d cannot be copied", wanted.first_layer, wanted.past_last_layer - 1)
                tell(StandbyProgress(problem=sentence_of(error)))

    async def take(self, commit: Commit, patience: float) -> Mapping[int, Bucket]:
        """The copies that include the last ``commit``; see `StandbyCopies.as_of`. Ends the role, unless cancelled."""
        async with self._one_at_a_time:
            copies = self._copies
            if copies is None:
                return {}
            taken = await copies.as_of(commit, patience)
            await self._end()
        log.info("standby: %d of %d buckets are taken over", len(taken), len(copies))
        return taken

    @property
    def copies(self) -> StandbyCopies | None:
        """The copies that are kept up; None: there are none."""
        return self._copies

    async def end(self) -> None:
        async with self._one_at_a_time:
            await self._end()

    async def _end(self) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            await copies.close()


def donors_of(wanted: Standby, buckets: Iterable[BucketSpec], node: str) -> dict[BucketSpec, list[Peer]]:
    """For each of ``buckets`` that the wanted layers use: the nodes that have it, other than ``node``."""
    addresses = {peer.node: peer for peer in wanted.peers}
    donors = {}
    for spec in buckets:
        if spec.used_by(wanted.first_layer, wanted.past_last_layer):
            known = (layer for layer in spec.layers if layer < len(wanted.donors))
            names = dict.fromkeys(name for layer in known for name in wanted.donors[layer].nodes if name != node)
            donors[spec] = [addresses[name] for name in names if name in addresses]
    return donors
