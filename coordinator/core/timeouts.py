"""The coordinator's time-outs, in leases. The lease is the run file's one knob; start-up checks the order of the LADDER. Those of
snapshots stand in copies/snapshot.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dtfm.protos import PEER_FRACTION

COMMIT_WAIT_LEASES = 0.01
"""The least time a commit may wait for a standby, however short steps are: gradients and the standby's word have to travel,
and devices are busy at times. See standby.COMMIT_WAIT_FRACTION for long steps."""

HASTE_LEASES = 0.01
"""The planner's time while nothing trains."""

TOGETHER_LEASES = 0.05
"""Newcomers that arrive within this time of one another are planned for together, so that a rush leads to one plan."""

HEARTBEAT_LEASES = 0.25
"""Time between two heartbeats of a node."""

SIGN_OF_LIFE_LEASES = 0.5
"""Two heartbeats: a live node is heard within this time. If it is not, another process that claims its identity gets it."""

LAST_REPORT_LEASES = 0.5
"""How long training waits for a standby of lost state to say how far it came."""

PLANNING_LEASES = 0.5
"""The planner's time while the run trains. If nodes come and go faster than plans, a plan is worth little."""

LONGEST_WAVE_LEASES = 1.0
"""Newcomers are planned with at most this long after the first of them arrived, even if more keep coming."""

GRACE_LEASES = 6
"""How long training waits for nodes to return with state that nobody else has: after a restart, or after they were lost."""

PROBE_LEASES = 6
"""How long a newcomer may take to measure its links. After that the missing ones count as average."""

AUDIT_LEASES = 6
"""The least time for the answer to an audit."""

AUDIT_FACTOR = 5
"""How many times as long as the step until its last vote an audit may take: at most it is one node's share of a step, done by a
slower node."""

AUDITORS_FRACTION = 2 / 3
"""Of that time the auditor's: then it says who kept it waiting, if anybody did, and is not taken for silent itself."""

STEP_LEASES = 12
"""The least time for a usual step: see step_patience."""

PATIENCE_LEASES = 100
"""How long a node that still gives signs of life may take for loading its state, or for a step of which little is known: the
first of a plan, which may compile and load, and one beside an evaluation, a snapshot or a copy of the state."""

STEP_FACTOR = 20
"""How many times as long as the last one a step may take."""

REMEMBERED_LEASES = 100
"""How long the links of a node that left stay valid, should it return."""


@dataclass(frozen=True, slots=True)
class Timeout:
    name: str
    leases: float


LADDER = (
    Timeout("for a standby, before a commit", COMMIT_WAIT_LEASES),
    Timeout("for a plan while nothing trains", HASTE_LEASES),
    Timeout("between two looks at the clock", TOGETHER_LEASES / 2),
    Timeout("for newcomers to count as coming together", TOGETHER_LEASES),
    Timeout("between two heartbeats", HEARTBEAT_LEASES),
    Timeout("for a sign of life of a node whose identity another process claims", SIGN_OF_LIFE_LEASES),
    Timeout("for a plan while the run trains", PLANNING_LEASES),
    Timeout("the lease", 1.0),
    Timeout("for newcomers that keep coming", LONGEST_WAVE_LEASES),
    Timeout("for nodes to return with state that nobody else has", GRACE_LEASES),
    Timeout("for measuring links", PROBE_LEASES),
    Timeout("for the answer to an audit", AUDIT_LEASES),
    Timeout("for a usual step", STEP_LEASES),
    Timeout("for loading state, or for the first step of a plan", PATIENCE_LEASES),
)
"""From the shortest to the longest: none may be longer than the next."""


def step_patience(lease: float, last: float | None, *, usual: bool, overdue: int) -> float:
    """Seconds for a step, of which the ``last`` one took so many (None: not known). ``usual``: nothing happens beside it.
    ``overdue``: how often nodes were waited for in vain since the last commit; each time they get twice as long."""
    if last is None:
        return lease * PATIENCE_LEASES
    least = STEP_LEASES * 2**overdue if usual else PATIENCE_LEASES
    return max(lease * min(least, PATIENCE_LEASES), STEP_FACTOR * last)


def audit_patience(lease: float, took: float, fetching: float = 0.0) -> float:
    """Seconds that an auditor has for its answer. ``took``: seconds from the step's beginning to its last vote. ``fetching``:
    seconds that one peer may need to hand out what is compared. The result is never longer than a step may take, as a peer may
    lie about slow links."""
    patience = max(lease * AUDIT_LEASES, AUDIT_FACTOR * took) + fetching / (AUDITORS_FRACTION * PEER_FRACTION)
    return min(patience, step_patience(lease, took, usual=True, overdue=0))


def check_ladder(ladder: Sequence[Timeout] = LADDER) -> None:
    """Raises ValueError if a time-out is longer than one that must outlast it, or if two heartbeats do not fit into the time
    for a sign of life."""
    for shorter, longer in pairwise(ladder):
        if shorter.leases > longer.leases:
            raise ValueError(
                f"the time-outs are out of order: {shorter.leases:g} leases {shorter.name} are more than {longer.leases:g} "
                f"{longer.name}; this is a bug in dtfm"
            )
    if 2 * HEARTBEAT_LEASES > SIGN_OF_LIFE_LEASES:
        raise ValueError(f"{SIGN_OF_LIFE_LEASES:g} leases leave no time for two heartbeats; this is a bug in dtfm")
