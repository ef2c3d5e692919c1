"""Getting ready for layers that this node may train later: it copies their state, and has their data and frozen weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from dtfm.node.data.holding import Holding
from dtfm.node.host.device import free_memory
from dtfm.node.model.bucket import HOST
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.state.frozen_layers import hold_frozen
from dtfm.node.state.standby_role import StandbyRole
from dtfm.protos.control_pb2 import NodeMessage, Standby

log = logging.getLogger(__name__)

FROZEN_EARLY = 0.5
"""The fraction of the host's free memory for frozen weights of layers that this node may get."""


class StandingBy:
    """Lives on one event loop. Any thread may read ``wanted``."""

    def __init__(self, node: str, data: Holding, report: Callable[[NodeMessage], None]) -> None:
        self.role = StandbyRole(node, report)
        self.wanted = Standby()
        """The coordinator's last request."""
        self._data = data

    async def stand_by(
        self, wanted: Standby, loaded: Callable[[], LoadedRun | None], trained: Callable[[], Collection[int]]
    ) -> None:
        """Starts standing by for the wanted layers. An empty range stops it. ``loaded`` and ``trained`` return the run, and the
        buckets that this node trains, as of the time of the call."""
        self.wanted = wanted
        if wanted.past_last_layer and (run := loaded()) is not None:
            await self._hold_data(run, wanted.first_layer, wanted.past_last_layer)
            await _hold_frozen(run, wanted)
            if self.wanted is not wanted:
                return  # a later request has come since
        run = loaded()
        if wanted.past_last_layer and run is not None:
            await self.role.assume(run, wanted, trained())
        else:
            await self.role.end()

    async def _hold_data(self, loaded: LoadedRun, first: int, past_last: int) -> None:
        """Before this node gets these layers: it has the samples, if it will need them, while nobody waits for it."""
        if first == 0 or past_last == len(loaded.model.layers) or loaded.data.sample.isolated:
            try:
                await asyncio.wrap_future(self._data.begin(loaded.data))
            except Exception as problem:  # whatever the file system raises comes again when the plan is adopted
                log.error("%s", problem)


async def _hold_frozen(loaded: LoadedRun, wanted: Standby) -> None:
    """Before this node gets these layers: it has their frozen weights in the host's memory, as far as there is room."""
    layers = wanted.first_layer, wanted.past_last_layer
    try:
        await hold_frozen(loaded, layers, wanted.frozen, wanted.peers, int(FROZEN_EARLY * free_memory(HOST)))
    except Exception as problem:  # it is read again when the plan is adopted
        log.error("%s", problem)
