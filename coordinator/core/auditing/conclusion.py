"""What audits come to for the step."""

from __future__ import annotations

from dataclasses import dataclass

from dtfm.coordinator.core.trust.verdict import Against
from dtfm.coordinator.log.charges import Charge


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The step is aborted, and goes on without those whom the verdict is against. The run goes back to a state of before
    the step ``back_before``, as what the liar did since then is to be undone; None: it does not go back."""

    verdict: Against
    charge: Charge
    reason: str
    back_before: int | None = None


@dataclass(frozen=True, slots=True)
class Unaudited:
    """The step is aborted, and done again by the same nodes: what ``node`` did could not be audited, as it withheld it."""

    node: str
    reason: str
