"""The coordinator's time-outs, in leases. The lease is the run file's one knob. Those of snapshots stand in
copies/snapshot.py."""

from __future__ import annotations

COMMIT_WAIT_LEASES = 0.01
"""The least time a commit may wait for a standby, however short steps are: gradients and the standby's word have to travel,
and devices are busy at times. See standby.COMMIT_WAIT_FRACTION for long steps."""

HASTE_LEASES = 0.01
"""The planner's time while nothing trains."""

TOGETHER_LEASES = 0.05
"""Newcomers that arrive within this time of one another are planned for together, so that a rush leads to one plan."""

HEARTBEAT_LEASES = 0.25
"""Time between two heartbeats of a node."""

TIMED_LEASES = 3
"""After an idle node has timed its device again, another timing is ignored for this time."""

IDLE_AGAIN_LEASES = 60
"""While a node is idle, the planner looks again after this time, though nothing calls for it: ten minutes, by default."""

SIGN_OF_LIFE_LEASES = 0.5
"""Two heartbeats: a live node is heard within this time. If it is not, another process that claims its identity gets it."""

LAST_REPORT_LEASES = 0.5
"""How long training waits for a standby of lost state to say how far it came."""

PLANNING_LEASES = 0.5
"""The planner's time while the run trains. If nodes come and go faster than plans, a plan is worth little."""

LONGEST_WAVE_LEASES = 1.0
"""Newcomers are planned with at most this long after the first of them arrived, even if more keep coming."""

TEST_LEASES = 3
"""What a node that is out of use has for timing its device, to show that it works."""

GRACE_LEASES = 6
"""How long training waits for nodes to return with state that nobody else has: after a restart, or after they were lost."""

PROBE_LEASES = 6
"""How long a newcomer may take to measure its links. After that the missing ones count as average."""

AUDITORS_FRACTION = 2 / 3
"""What an auditor has for its answer, of the time for a usual step. Then it says who kept it waiting, if anybody did, and is not
taken for silent itself."""

STEP_LEASES = 12
"""The least time for a usual step: see step_patience."""

PATIENCE_LEASES = 100
"""How long a node that still gives signs of life may take for loading its state, or for a step of which little is known: the
first of a plan, which may compile and load, and one beside an evaluation, a snapshot or a copy of the state."""

STEP_FACTOR = 20
"""How many times as long as the last one a step may take."""


LONGEST_PAUSE_LEASES = 360.0
"""The longest pause before something that does not work, or has become slow, is tried again: an hour, with a lease of ten
seconds."""


def pause_leases(failures: int) -> float:
    """The leases for which a node that has failed this number of times in a row is left alone."""
    return min(2.0 ** (failures - 1), LONGEST_PAUSE_LEASES) if failures < 64 else LONGEST_PAUSE_LEASES


# None may be longer than one that has to outlast it, and the first sign of life has time for two heartbeats.
assert COMMIT_WAIT_LEASES <= HASTE_LEASES <= TOGETHER_LEASES / 2 <= TOGETHER_LEASES <= HEARTBEAT_LEASES
assert 2 * HEARTBEAT_LEASES <= SIGN_OF_LIFE_LEASES <= PLANNING_LEASES <= 1.0 <= LONGEST_WAVE_LEASES <= GRACE_LEASES
assert GRACE_LEASES <= PROBE_LEASES <= STEP_LEASES <= PATIENCE_LEASES


def step_patience(lease: float, last: float | None, *, usual: bool, overdue: int) -> float:
    """Seconds for a step, of which the ``last`` one took so many (None: not known). ``usual``: nothing happens beside it.
    ``overdue``: how often nodes were waited for in vain since the last commit; each time they get twice as long."""
    if last is None:
        return lease * PATIENCE_LEASES
    least = STEP_LEASES * 2**overdue if usual else PATIENCE_LEASES
    return max(lease * min(least, PATIENCE_LEASES), STEP_FACTOR * last)
