"""What tells of steps and held-out losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """``loss`` is the mean over ``samples``; ``gradient_norm`` is the whole model's, before clipping; ``compute_seconds`` and
    ``wait_seconds`` are by node. ``resumed``: part of the step was done in an earlier generation, and ``seconds`` is the time of
    the rest."""

    step: int
    generation: int
    loss: float
    tokens: int
    gradient_norm: float
    seconds: float
    samples: int
    compute_seconds: dict[str, float]
    wait_seconds: dict[str, float]
    resumed: bool = False
    event: Literal["step_committed"] = "step_committed"

    @property
    def tokens_per_second(self) -> float | None:
        """None if the time of the whole step is not known."""
        return self.tokens / self.seconds if self.seconds > 0 and not self.resumed else None


@dataclass(frozen=True, slots=True)
class GradientsClipped:
    """In an open run, replicas found the gradients of others too large for ``step``, and clipped them before they added them up.
    ``times``: by who did it, then by whose they were, how many times over the bound the worst piece was, at most 1e9."""

    step: int
    generation: int
    times: dict[str, dict[str, float]]
    event: Literal["gradients_clipped"] = "gradients_clipped"


@dataclass(frozen=True, slots=True)
class StepAborted:
    """``problem`` is the name of the wire's StepProblem, or NODE_LEFT, OVERDUE, SETTLED or UNAUDITED (ledger.py); ``node`` the
    node that reported it, was lost, waited for, quarantined or could not be audited; ``peer`` whom it lost, for PEER_LOST;
    ``suspects`` who all may be the cause, for OVERDUE."""

    step: int
    generation: int
    problem: str
    node: str
    reason: str
    peer: str = ""
    suspects: tuple[str, ...] = ()
    event: Literal["step_aborted"] = "step_aborted"


@dataclass(frozen=True, slots=True)
class DigestMismatch:
    """The replicas of a stage hold different state before ``step``. That is settled against some of them: NodeQuarantined."""

    step: int
    generation: int
    stage: int
    digests: dict[str, str]
    event: Literal["digest_mismatch"] = "digest_mismatch"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The loss over held-out samples, in nats per token, and that of a model that knows token frequencies alone."""

    step: int
    loss: float
    samples: int
    unigram_entropy: float
    event: Literal["evaluated"] = "evaluated"
