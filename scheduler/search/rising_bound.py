"""A certified lower bound that rises while the search runs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType

from dtfm.scheduler.bound.rising_bounds import rising_bounds
from dtfm.scheduler.cost.bounds import work_bound
from dtfm.scheduler.model.problem import Problem

AS_GOOD = 1.005
"""A plan that takes at most this many times the bound is as good as any."""


class RisingBound:
    """Computes ever better bounds on a thread of its own, from entering the context until leaving it.

    ``seconds`` is the best bound so far. ``bounded`` is called with each. With ``wait``, entering waits for the last, so that the
    same problem always has the same bound.
    """

    def __init__(
        self, problem: Problem, bounded: Callable[[float], None], stopped: Callable[[], bool], wait: bool
    ) -> None:
        self.seconds = work_bound(problem.workload, problem.flops)
        self._problem = problem
        self._bounded = bounded
        self._stopped = stopped
        self._wait = wait
        self._over = Event()
        self._thread = Thread(target=self._rise, name="bound", daemon=True)

    def __enter__(self) -> RisingBound:
        self._thread.start()
        if self._wait:
            self._thread.join()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()  # the thread ends with its next step; the plan does not wait for that

    def reached(self, seconds: float) -> bool:
        """Whether a plan that takes ``seconds`` is as good as any."""
        return seconds <= AS_GOOD * self.seconds

    def _rise(self) -> None:
        for seconds in rising_bounds(self._problem):
            if self._over.is_set() or self._stopped():
                return
            if seconds > self.seconds:
                self.seconds = seconds
                self._bounded(seconds)
