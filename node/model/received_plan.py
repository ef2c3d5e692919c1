"""The plan that the coordinator sends, checked before it is used."""

from __future__ import annotations

from dtfm.scheduler.formats.plan import unpack_plan
from dtfm.scheduler.model.plan import Plan, check

MOST_TAKEOVERS = 1000
"""As many as nodes can be members of a run."""


def read_plan(packed: bytes, layers: int, micro_batches: int) -> Plan:
    """The plan as `pack_plan` has it. ``layers`` and ``micro_batches`` are those of the model and of a step.

    Raises ValueError, which names what is wrong, unless its parts fit together (plan.check).
    """
    plan = unpack_plan(packed)
    if len(plan.takeovers) > MOST_TAKEOVERS:
        raise ValueError(f"the plan has {len(plan.takeovers)} takeovers; it may have {MOST_TAKEOVERS}")
    check(plan, layers, micro_batches)
    if len(plan.islands) > 1 and not plan.rounds.count:
        raise ValueError(
            f"there are {len(plan.islands)} islands, and no rounds after which they exchange what they learn"
        )
    return plan
