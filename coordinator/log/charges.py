"""What members are quarantined for."""

from __future__ import annotations

import enum


class Charge(enum.StrEnum):
    """The event NodeQuarantined, and what people read, name one of these."""

    SAMPLE_COUNT = "SAMPLE_COUNT"
    """It counted other samples than those that its part in the plan gives it."""
    DIGEST = "DIGEST"
    """Its state differs from that of the other replicas of its stage."""
    STATE = "STATE"
    """It handed out other state than it has, as several say who got it."""
    GRADIENT_NORM = "GRADIENT_NORM"
    """Its reduced gradient differs from that of the other replicas of its stage."""
    NON_FINITE = "NON_FINITE"
    """It alone reported NaN or infinity, again and again."""
    SPOILS = "SPOILS"
    """Others could do a step without it, and reported NaN, infinity or failures with it. Or strangers could not do it without any
    one of them, and it was one of those who said so."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """Its device ran out of memory, again and again."""
    STEP_FAILED = "STEP_FAILED"
    """It alone could not do its part of a step, again and again."""
    PLAN_FAILED = "PLAN_FAILED"
    """It could not take its part in a plan, again and again."""
    STALLED = "STALLED"
    """It was waited for in vain, again and again, though its heartbeats came."""
    SNAPSHOT = "SNAPSHOT"
    """The last checkpoint failed because of it, again and again; or it wrote another file of the same state than other
    replicas."""
    HOP = "HOP"
    """What it says to have sent to another node, or got from it, is not what that one says."""
    AUDIT = "AUDIT"
    """Others did its work again and came to something else, or it said so of work that others found right."""
    WITHHELD = "WITHHELD"
    """Audits could not be done because of it, again and again."""
    OPERATOR = "OPERATOR"
    """An operator has expelled it."""
