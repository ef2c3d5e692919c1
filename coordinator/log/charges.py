"""Charges: the wrong work that members are suspected of, and quarantined for. Health is whether a node works (log/health.py)."""

from __future__ import annotations

import enum


class Charge(enum.StrEnum):
    """The events Suspected and NodeQuarantined, and what people read, name one of these."""

    SAMPLE_COUNT = "SAMPLE_COUNT"
    """It counted other samples than the samples of its part in the plan."""
    DIGEST = "DIGEST"
    """Its state differs from the state of another replica of its stage."""
    STATE = "STATE"
    """It handed out other state than it holds, or it accuses a node of this that has not done so."""
    GRADIENT_NORM = "GRADIENT_NORM"
    """Its reduced gradient differs from the gradient of another replica of its stage."""
    HOP = "HOP"
    """Its vote lacks something that passed between it and another node, contradicts itself, or contradicts the other's vote."""
    AUDIT = "AUDIT"
    """Another node repeated its work and got another result; or it said so about work that others found right."""
    EVALUATION = "EVALUATION"
    """Another node evaluated the same held-out samples and got another loss."""
    SNAPSHOT = "SNAPSHOT"
    """It wrote another file of the same state than another replica."""
    WITHHELD = "WITHHELD"
    """It refused to hand out what an audit needed, or left after an auditor of its work had got another result."""
    OPERATOR = "OPERATOR"
    """An operator has expelled it."""

    # Older logs also have these. No new suspicion has them.
    SILENT = "SILENT"
    NON_FINITE = "NON_FINITE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    STEP_FAILED = "STEP_FAILED"
    PLAN_FAILED = "PLAN_FAILED"
    STALLED = "STALLED"
    PEER_LOST = "PEER_LOST"

    @property
    def is_contradiction(self) -> bool:
        """Whether two nodes say things that cannot both be true. Such pairs are kept apart immediately, others after several
        attempts."""
        return self in _CONTRADICTIONS

    @property
    def is_health(self) -> bool:
        """Whether the charge only says that the node did not work, as in older logs."""
        return self in _HEALTH

    @property
    def commits(self) -> int:
        """The number of commits after which a suspicion with this charge is forgotten."""
        return 100 if self in _CONTRADICTIONS else 30


_CONTRADICTIONS = frozenset(
    {Charge.DIGEST, Charge.STATE, Charge.GRADIENT_NORM, Charge.HOP, Charge.AUDIT, Charge.EVALUATION, Charge.SNAPSHOT}
)
_HEALTH = frozenset(
    {
        Charge.SILENT,
        Charge.NON_FINITE,
        Charge.OUT_OF_MEMORY,
        Charge.STEP_FAILED,
        Charge.PLAN_FAILED,
        Charge.STALLED,
        Charge.PEER_LOST,
    }
)
