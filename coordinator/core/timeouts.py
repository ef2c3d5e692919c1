"""Every time-out of the coordinator, as a ladder: each follows from the run's one knob, the lease, and each rung needs those
below it to be shorter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dtfm.coordinator.core.state import (
    GRACE_LEASES,
    HASTE_LEASES,
    HEARTBEAT_LEASES,
    LONGEST_WAVE_LEASES,
    PATIENCE_LEASES,
    PLANNING_LEASES,
    PROBE_LEASES,
    SIGN_OF_LIFE_LEASES,
    TOGETHER_LEASES,
    WORD_LEASES,
)


@dataclass(frozen=True, slots=True)
class Timeout:
    name: str
    leases: float


LADDER = (
    Timeout("for a copy of what only one node trains, before a commit", WORD_LEASES),
    Timeout("for a plan to be found while nothing trains", HASTE_LEASES),
    Timeout("between two looks at the clock", TOGETHER_LEASES / 2),
    Timeout("for newcomers to count as coming together", TOGETHER_LEASES),
    Timeout("between two heartbeats", HEARTBEAT_LEASES),
    Timeout("for a sign of life of a node whose identity another claims", SIGN_OF_LIFE_LEASES),
    Timeout("for a plan to be found", PLANNING_LEASES),
    Timeout("the lease", 1.0),
    Timeout("for newcomers that come in a row", LONGEST_WAVE_LEASES),
    Timeout("for nodes to come back with what nobody else has", GRACE_LEASES),
    Timeout("for measuring links", PROBE_LEASES),
    Timeout("for a step, or for loading state", PATIENCE_LEASES),
)


def check_ladder(ladder: Sequence[Timeout] = LADDER) -> None:
    """Raises ValueError where a time-out is longer than one that must outlast it, or where two heartbeats do not fit into
    a lease."""
    for shorter, longer in pairwise(ladder):
        if shorter.leases > longer.leases:
            raise ValueError(
                f"the time-outs are out of order: {shorter.leases:g} leases {shorter.name} are more than {longer.leases:g} "
                f"{longer.name}; this is a bug in dtfm"
            )
    if 2 * HEARTBEAT_LEASES > SIGN_OF_LIFE_LEASES:
        raise ValueError(f"{SIGN_OF_LIFE_LEASES:g} leases leave no time for two heartbeats; this is a bug in dtfm")
