"""What tells of plans: what they wait for, and whether they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from dtfm.coordinator.log.older_plan import as_written_now
from dtfm.scheduler.model.plan import Plan

#: By destination, then by tensors ("activations", "gradients", "reduction"): the codec.
Codecs = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing trains, for this reason."""

    reason: str
    event: Literal["waiting"] = "waiting"


@dataclass(frozen=True, slots=True)
class PlanAdopted:
    """``step`` is the last committed one. Work on the next step that was done since generation ``counts_from`` still counts.
    The seconds are the planner's prediction for a step, and its lower bound, if any."""

    generation: int
    plan: Annotated[Plan, BeforeValidator(as_written_now)]
    reason: str
    step: int
    predicted_seconds: float | None = None
    lower_bound_seconds: float | None = None
    counts_from: int = 0
    event: Literal["plan_adopted"] = "plan_adopted"


@dataclass(frozen=True, slots=True)
class PlanStarted:
    """Every node of the plan holds its state: ``step`` begins, or goes on, if ``finished`` micro-batches are done in some stage.
    ``codecs`` are by source."""

    generation: int
    step: int
    finished: int = 0
    codecs: Mapping[str, Codecs] = field(default_factory=dict)
    event: Literal["plan_started"] = "plan_started"


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """A node could not take its part. ``snapshot_damaged``: a part of the snapshot that holds the state is damaged on every disk
    that has it; or the checkpoint is, or another one is in its place. ``lost``: layers whose state the node was expected to hold,
    and does not. ``silent``: it has not said so, it was waited for in vain, and it was one of the ``suspects``. Otherwise these
    are the node and those who alone could give it its state, if one party alone could."""

    generation: int
    node: str
    reason: str
    snapshot_damaged: Annotated[bool, Field(validation_alias=AliasChoices("snapshot_damaged", "backup"))] = False
    lost: tuple[int, ...] = ()
    silent: bool = False
    suspects: tuple[str, ...] = ()
    event: Literal["plan_failed"] = "plan_failed"


@dataclass(frozen=True, slots=True)
class CodecsChosen:
    """The node's links have changed, and with them the codecs of what it sends."""

    node: str
    codecs: Codecs
    event: Literal["codecs_chosen"] = "codecs_chosen"
