"""What members are suspected of, and quarantined for."""

from __future__ import annotations

import enum


class Charge(enum.StrEnum):
    """The events Suspected and NodeQuarantined, and what people read, name one of these."""

    SAMPLE_COUNT = "SAMPLE_COUNT"
    """It counted other samples than those that its part in the plan gives it."""
    DIGEST = "DIGEST"
    """Its state differs from that of another replica of its stage."""
    STATE = "STATE"
    """It has handed out another state than it holds, or says so of somebody who has not."""
    GRADIENT_NORM = "GRADIENT_NORM"
    """Its reduced gradient differs from that of another replica of its stage."""
    HOP = "HOP"
    """Its vote lacks something that passed between it and another node, contradicts itself, or contradicts the other's vote."""
    AUDIT = "AUDIT"
    """Another node repeated its work and got another result, or it said so of work that others found right."""
    EVALUATION = "EVALUATION"
    """Another node evaluated the same held-out samples and got another loss."""
    SNAPSHOT = "SNAPSHOT"
    """It wrote another file of the same state than another replica."""
    WITHHELD = "WITHHELD"
    """It did not hand out what an audit needed, or left while its own work was being audited."""
    SILENT = "SILENT"
    """It did not answer an audit that it was asked for."""
    NON_FINITE = "NON_FINITE"
    """NaN or infinity began with it."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """Its device ran out of memory."""
    STEP_FAILED = "STEP_FAILED"
    """It could not do its part of a step."""
    PLAN_FAILED = "PLAN_FAILED"
    """It could not take its part in a plan, or did not hand out the state that another needed for that."""
    STALLED = "STALLED"
    """It was waited for in vain, though its heartbeats came."""
    PEER_LOST = "PEER_LOST"
    """It and another node could not reach each other. Nobody is quarantined for this: the line may be at fault."""
    OPERATOR = "OPERATOR"
    """An operator has expelled it."""

    @property
    def is_contradiction(self) -> bool:
        """Whether two nodes say what cannot both be true. They are kept apart at once; other pairs after several attempts."""
        return self in _CONTRADICTIONS

    @property
    def commits(self) -> int:
        """The number of commits after which a suspicion of this is forgotten. With 1, a commit clears who took part in it."""
        if self in _CONTRADICTIONS:
            return 100
        return 30 if self in (Charge.WITHHELD, Charge.SILENT) else 1


_CONTRADICTIONS = frozenset(
    {Charge.DIGEST, Charge.STATE, Charge.GRADIENT_NORM, Charge.HOP, Charge.AUDIT, Charge.EVALUATION, Charge.SNAPSHOT}
)
