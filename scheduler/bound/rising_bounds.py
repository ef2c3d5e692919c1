"""Lower bounds on the seconds per step of any plan, certified, which rise while a search runs.

Four arguments, each valid for any groups, cuts, loads, routes and order of stages:

- Devices share the work: way.work_bound.
- A way through all stages: way.py. This says most with few micro-batches.
- Each node with its own memory, connection and links: capacity.py counts what a node can complete in T seconds, node_prices.py
  shows that the nodes do not suffice. This says most with many unequal nodes.
- All plans of a small cluster, stage by stage: branch_and_bound.py. This says most, and takes too long with many nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from threading import Event, Thread
from types import TracebackType

from dtfm.scheduler.bound.branch_and_bound import is_small, promising
from dtfm.scheduler.bound.node_prices import ruled_out
from dtfm.scheduler.bound.way import way_bound, work_bound
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.request import Shape

AS_GOOD = 1.005
"""A plan that takes at most this many times the bound is as good as any."""
MOST_NODES = 256
"""Largest number of nodes for which more than work_bound is computed."""
MOST_BESIDE_A_SEARCH = 32
"""Largest number of nodes for which more than the QUICK first bounds are computed beside a search with a deadline."""
QUICK = 2
STEPS = 100
"""Default number of changes of the nodes' prices (node_prices.ruled_out)."""
ENTRIES_PER_NODE = 4e5
"""Number of table entries that are priced, per node: about half a second for 16 nodes, three seconds for 128."""
GROWTH, FARTHEST = 1.1, 10.0
"""Quotient of two times for which the plans of a small cluster are listed, and the longest of these times, in times the first.
Probably no plan exists then."""
MOST_OPEN = 5_000
"""Largest number of partial plans of one length that are continued for a bound."""


def rising_bounds(problem: Problem, steps: int = STEPS) -> Iterator[float]:
    """Certified lower bounds on the seconds per step of any feasible plan, each at least as good as the one before.

    The first takes no time, and one can stop at any time. ``steps`` limits the work.
    """
    bound = work_bound(problem.workload, problem.flops)
    yield bound
    if len(problem.flops) > MOST_NODES:
        return
    bound = max(bound, way_bound(problem))
    yield bound
    for seconds in ruled_out(problem, bound, steps, ENTRIES_PER_NODE * len(problem.flops)):
        bound = max(bound, seconds * (1 - 1e-9))
        yield bound
    # Where each stage needs a proven node, fewer plans are listed; but an incumbent without may stay.
    if is_small(problem) and not problem.is_mixed:
        yield from listed(problem, bound)


def listed(problem: Problem, bound: float) -> Iterator[float]:
    """The least seconds of any plan that may beat a time, for longer and longer times until there is such a plan."""
    shape = Shape(most_stages=min(len(problem.flops), len(problem.activation)))
    tried = bound
    while tried < FARTHEST * bound:
        tried *= GROWTH
        least = promising(problem, shape, True, tried, MOST_OPEN, over=lambda: False).least
        yield max(bound, least)
        if least < tried:
            return


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
        # Beside a search that must end in time, a better bound of many nodes would take from that a third of its time.
        most = QUICK if not self._wait and len(self._problem.flops) > MOST_BESIDE_A_SEARCH else None
        for seconds in islice(rising_bounds(self._problem), most):
            if self._over.is_set() or self._stopped():
                return
            if seconds > self.seconds:
                self.seconds = seconds
                self._bounded(seconds)
