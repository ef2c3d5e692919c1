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

CUT_OFF_LEASES = 30
"""How long training waits for nodes that fell silent while they trained, if they have state that nobody else has. They may be cut
off from the coordinator alone, and come back when the line does. Their state is lost if training goes back before that."""

PROBE_LEASES = 6
"""How long a newcomer may take to measure its links. After that the missing ones count as average."""

AUDITORS_FRACTION = 2 / 3
"""What an auditor has for its answer, of the time for a usual step. Then it says who kept it waiting, if anybody did, and is not
taken for silent itself."""

HUNG_LEASES = 1.0
"""A node that does nothing for this time, and for that of a step, while others wait for it, is left out."""

STEP_LEASES = 4
"""What a step may take longer than STEP_FACTOR times what is expected of it."""

STEP_FACTOR = 3
"""How many times as long as expected a node may take: what it claims to have done is believed for so long."""

BESIDE = 2
"""How many times as long as a usual step the first one of a plan may take, or one beside an evaluation, a snapshot or a copy."""

COMPILE_LEASES = 6
"""What a node may take for compiling layers, where the run file asks for that, in a plan's first step and in an evaluation."""

READY_LEASES = 12
"""What nodes have for becoming ready for a plan, or for confirming a commit, beside what is expected of that; and for a step of
which nothing is known."""

PATIENCE_LEASES = 100
"""How long copies of the state and checkpoints may take beside the steps, for which nobody waits."""


LONGEST_PAUSE_LEASES = 360.0
"""The longest pause before something that does not work, or has become slow, is tried again: an hour, with a lease of ten
seconds."""


def pause_leases(failures: int) -> float:
    """The leases for which a node that has failed this number of times in a row is left alone."""
    return min(2.0 ** (failures - 1), LONGEST_PAUSE_LEASES) if failures < 64 else LONGEST_PAUSE_LEASES


# None may be longer than one that has to outlast it, and the first sign of life has time for two heartbeats.
assert COMMIT_WAIT_LEASES <= HASTE_LEASES <= TOGETHER_LEASES / 2 <= TOGETHER_LEASES <= HEARTBEAT_LEASES
assert 2 * HEARTBEAT_LEASES <= SIGN_OF_LIFE_LEASES <= PLANNING_LEASES <= 1.0 <= LONGEST_WAVE_LEASES <= GRACE_LEASES
assert HUNG_LEASES <= STEP_LEASES <= GRACE_LEASES <= PROBE_LEASES <= READY_LEASES <= CUT_OFF_LEASES <= PATIENCE_LEASES


def step_patience(lease: float, expected: float | None, *, usual: bool) -> float:
    """Seconds for a step that is ``expected`` to take so many (None: not known). ``usual``: nothing happens beside it."""
    if expected is None:
        return READY_LEASES * lease
    return (STEP_LEASES * lease + STEP_FACTOR * expected) * (1 if usual else BESIDE)
