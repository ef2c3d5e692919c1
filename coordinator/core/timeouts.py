"""The coordinator's time-outs, in leases. The lease is the run file's only time-out. Time-outs of snapshots are in
copies/snapshot.py."""

from __future__ import annotations

from dtfm.coordinator.log.health import LONGEST_PAUSE_LEASES

COMMIT_WAIT_LEASES = 0.01
"""The least time a commit may wait for a standby, however short steps are: gradients and the standby's report have to travel, and
devices are busy at times. For long steps see COMMIT_WAIT_FRACTION in copies/keeping_up.py."""

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
"""Two heartbeats: a live node is heard within this time. If it is not heard, another process may take its identity."""

LAST_REPORT_LEASES = 0.5
"""How long training waits for a standby of lost state to report its last step."""

PLANNING_LEASES = 0.5
"""The planner's time while the run trains. If nodes come and go faster than plans, a plan is worth little."""

LONGEST_WAVE_LEASES = 1.0
"""Newcomers wait at most this long after the first of them arrived, even if more keep coming. Then plans may use them."""

TEST_LEASES = 3
"""The time in which a node that is out of use must time its device, to show that it works."""

GRACE_LEASES = 6
"""How long training waits for nodes to return with state that no other node has: after a restart, or after they were lost."""

CUT_OFF_LEASES = 30
"""How long training waits for nodes that fell silent while they trained, if they have state that no other node has. They may be
cut off from the coordinator alone, and return with the line. Their state is lost if training goes back before that."""

PROBE_LEASES = 6
"""How long a newcomer may take to measure its links. After that the missing ones count as average."""

AUDITORS_FRACTION = 2 / 3
"""The fraction of a usual step's patience that an auditor has for its answer. The auditor can then still say which node kept it
waiting, and does not count as silent itself."""

HUNG_LEASES = 1.0
"""A node is left out if it does nothing for this time and the time of a step, while others wait for it."""

STEP_LEASES = 4
"""The time that a step may take beyond STEP_FACTOR times its expected time."""

STEP_FACTOR = 3
"""How many times its expected time a node may take. For so long, the coordinator believes its reports of progress."""

BESIDE = 2
"""How many times a usual step's time the first step of a plan may take, or a step beside an evaluation, a snapshot or a copy."""

COMPILE_LEASES = 6
"""The time for compiling layers, if the run file asks for that, in a plan's first step and in an evaluation."""

READY_LEASES = 12
"""The time for nodes to become ready for a plan, or to confirm a commit, beyond the expected time. Also the time for a step whose
expected time is not known."""

PATIENCE_LEASES = 100
"""How long copies of the state and checkpoints may take beside the steps. Nothing waits for them."""


def pause_leases(failures: int) -> float:
    """The number of leases before a node that has failed this number of times in a row is tested again."""
    return min(2.0 ** (failures - 1), LONGEST_PAUSE_LEASES) if failures < 64 else LONGEST_PAUSE_LEASES


# A time-out may not be longer than another that has to outlast it. The first sign of life has time for two heartbeats.
assert COMMIT_WAIT_LEASES <= HASTE_LEASES <= TOGETHER_LEASES / 2 <= TOGETHER_LEASES <= HEARTBEAT_LEASES
assert 2 * HEARTBEAT_LEASES <= SIGN_OF_LIFE_LEASES <= PLANNING_LEASES <= 1.0 <= LONGEST_WAVE_LEASES <= GRACE_LEASES
assert HUNG_LEASES <= STEP_LEASES <= GRACE_LEASES <= PROBE_LEASES <= READY_LEASES <= CUT_OFF_LEASES <= PATIENCE_LEASES


def step_patience(lease: float, expected: float | None, *, usual: bool) -> float:
    """The seconds that a step may take. ``expected``: its expected seconds; None: not known. ``usual``: nothing else happens
    beside it."""
    if expected is None:
        return READY_LEASES * lease
    return (STEP_LEASES * lease + STEP_FACTOR * expected) * (1 if usual else BESIDE)
