"""The planner's thread: the scheduler is loaded and compiled apart from the loop, and answers one question after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING

from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.core.transition import Planned, PlanWanted

if TYPE_CHECKING:
    from dtfm.coordinator.service.planning.planner import Kept  # which loads the scheduler

log = logging.getLogger(__name__)


class PlannerThread:
    """For an event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "plan")
        self._kept: Kept | None = None  # by the planner
        self._compiling: asyncio.Task[None] | None = None

    def compile(self) -> asyncio.Task[None]:
        """Begins to compile. Returns the task, to be cancelled at the end."""
        self._compiling = asyncio.create_task(_compile())
        return self._compiling

    async def plan(self, wanted: PlanWanted, dropped: Callable[[], bool]) -> Planned:
        """The answer, once all is compiled. ``dropped``: whether nobody wants it any more; called in the thread."""
        assert self._compiling is not None
        outcome: PlanChosen | str
        hopeless = False
        await asyncio.wait([self._compiling])
        try:
            from dtfm.coordinator.service.planning.planner import Kept, choose

            self._kept = self._kept or Kept()
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(self._thread, choose, wanted, dropped, self._kept)
        except ValueError as error:
            outcome, hopeless = str(error), True
        except Exception as error:
            log.exception("the planner failed")
            outcome, hopeless = f"the planner failed ({type(error).__name__}: {error}); this is a bug in dtfm", False
        return Planned(wanted.number, outcome, hopeless)

    def close(self) -> None:
        """Waits for nothing."""
        self._thread.shutdown(wait=False, cancel_futures=True)


async def _compile() -> None:
    """Loads the planner too. Otherwise nodes would wait a second for it before they reach the coordinator after a restart."""
    planner = await asyncio.to_thread(import_module, "dtfm.coordinator.service.planning.planner")
    await planner.compile_scheduler()
