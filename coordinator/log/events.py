"""The events of the log. Everything the coordinator keeps for good is a fold of them (ledger.py).

Each event is in the file of its subject, with its effect on the ledger (``apply``) and its sentence for people (``narrate``).
Their JSON is a contract: scripts read it from ``--json``, and the store keeps it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Union

from pydantic import Field, TypeAdapter, ValidationError

from dtfm.coordinator.log.access import (
    Enrolled as Enrolled,
    InvitationMade as InvitationMade,
    Revoked as Revoked,
)
from dtfm.coordinator.log.copies import (
    CheckpointFailed as CheckpointFailed,
    CheckpointFile as CheckpointFile,
    CheckpointWritten as CheckpointWritten,
    DiskShort as DiskShort,
    RolledBack as RolledBack,
    SnapshotPart as SnapshotPart,
    SnapshotWritten as SnapshotWritten,
    StandbyPromoted as StandbyPromoted,
    StateAgreed as StateAgreed,
)
from dtfm.coordinator.log.health import (
    NodeOutOfUse as NodeOutOfUse,
    NodeTested as NodeTested,
)
from dtfm.coordinator.log.members import (
    DeviceDrifted as DeviceDrifted,
    DeviceSeen as DeviceSeen,
    DeviceShown as DeviceShown,
    DeviceTimed as DeviceTimed,
    NodeJoined as NodeJoined,
    NodeLeaving as NodeLeaving,
    NodeLeft as NodeLeft,
    NodePrepares as NodePrepares,
    NodeReady as NodeReady,
    NodeRefused as NodeRefused,
    Preparing as Preparing,
)
from dtfm.coordinator.log.plan_failed import PlanFailed as PlanFailed
from dtfm.coordinator.log.reach import (
    Link as Link,
    LinksMeasured as LinksMeasured,
    Way as Way,
    WaysChosen as WaysChosen,
)
from dtfm.coordinator.log.recent_losses import LossSpiked as LossSpiked
from dtfm.coordinator.log.run import (
    CoordinatorStopped as CoordinatorStopped,
    DataConfirmed as DataConfirmed,
    Described as Described,
    DescriptionDropped as DescriptionDropped,
    Listens as Listens,
    RunChanged as RunChanged,
    RunContinued as RunContinued,
    RunDescribed as RunDescribed,
    RunFailed as RunFailed,
    RunFinished as RunFinished,
    RunPaused as RunPaused,
    RunResumed as RunResumed,
    RunStarted as RunStarted,
    RunStopped as RunStopped,
    Waiting as Waiting,
)
from dtfm.coordinator.log.steps import (
    DigestMismatch as DigestMismatch,
    Evaluated as Evaluated,
    GradientsClipped as GradientsClipped,
    StageBounded as StageBounded,
    StepAborted as StepAborted,
    StepCommitted as StepCommitted,
    TextWritten as TextWritten,
)
from dtfm.coordinator.log.training import (
    Codecs as Codecs,
    CodecsChosen as CodecsChosen,
    PlanAdopted as PlanAdopted,
    PlanRepriced as PlanRepriced,
    PlanStarted as PlanStarted,
)
from dtfm.coordinator.log.trust import (
    NodeForgiven as NodeForgiven,
    NodeQuarantined as NodeQuarantined,
    StandingChanged as StandingChanged,
    StandingLost as StandingLost,
    Suspected as Suspected,
    WorkAudited as WorkAudited,
)
from dtfm.coordinator.log.unaudited import StagesUnaudited as StagesUnaudited

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

    class Event(Protocol):
        """The members that every event named here has."""

        @property
        def event(self) -> str: ...

        def apply(self, ledger: Ledger) -> Ledger: ...

        def narrate(self) -> str: ...
else:
    _KINDS = tuple(kind for kind in list(vars().values()) if hasattr(kind, "narrate"))
    Event = Union[_KINDS]  # noqa: UP007

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def to_json(event: Event) -> dict[str, Any]:
    """The event as JSON values, its name first."""
    fields: dict[str, Any] = _ADAPTER.dump_python(event, mode="json")
    return {"event": fields.pop("event"), **fields}


def from_json(value: dict[str, Any]) -> Event:
    """The inverse of ``to_json``. Raises ValueError if this version knows no such event."""
    return from_text(json.dumps(value))


def to_text(event: Event) -> str:
    """The event as one line of JSON, as short as possible."""
    return _ADAPTER.dump_json(event).decode()


def from_text(text: str) -> Event:
    """``from_json`` of JSON text."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise ValueError(f"not an event of this version of dtfm: {problem}") from None
