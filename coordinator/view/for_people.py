"""Which events a person must know about, and how serious each is. Scripts, `events`, and `serve --verbose` get all of them."""

from __future__ import annotations

import enum

from dtfm.coordinator.log import events as ev
from dtfm.protos.identity.access import Role

EVERY_STEPS = 10
"""Of the steps, the first one is shown, and then one of this many."""

_DETAILS = (
    # The way to readiness: people see the join itself, and the plan after it.
    ev.NodePrepares,
    ev.NodeReady,
    ev.WaysChosen,
    ev.DeviceTimed,
    ev.DeviceShown,
    ev.DataConfirmed,
    ev.PlanStarted,
    ev.CodecsChosen,
    # Things that go right after a step.
    ev.StateAgreed,
    ev.SnapshotWritten,
    # People see their results: a changed standing, a quarantine.
    ev.WorkAudited,
    ev.GradientsClipped,
    ev.Suspected,
)


class Severity(enum.IntEnum):
    """The larger the value, the sooner a person should look."""

    INFO = 0
    WARNING = 1
    """The run goes on, with something less."""
    PROBLEM = 2
    """A node did wrong, the run is at its end, or it does not go on without an operator."""

    @property
    def word(self) -> str:
        return self.name.lower()


_WARNINGS = (
    ev.NodeLeaving,
    ev.NodeRefused,
    ev.NodeOutOfUse,
    ev.StandingLost,
    ev.StepAborted,
    ev.CheckpointFailed,
    ev.DiskShort,
    ev.PlanFailed,
    ev.GradientsClipped,
    ev.StageBounded,
    ev.DescriptionDropped,
    ev.RunPaused,
    ev.Suspected,
)
IN_ORDER = ("in order", "goodbye", "its stream was replaced")
"""How the reasons begin of nodes that left when they were done, or came back."""
_PROBLEMS = (ev.NodeQuarantined, ev.RolledBack, ev.RunFailed, ev.DigestMismatch)


def severity(event: ev.Event) -> Severity:
    """How serious the event is. A node that left in order is no warning."""
    match event:
        case ev.NodeLeft(reason=reason):
            return Severity.INFO if reason.startswith(IN_ORDER) else Severity.WARNING
        case ev.Waiting(asks=asks):
            return Severity.PROBLEM if asks else Severity.INFO
        case ev.DeviceDrifted(reason=reason):
            return Severity.WARNING if "slower" in reason else Severity.INFO
        case ev.LinksMeasured(links=links):
            return Severity.WARNING if any(link.problem for link in links) else Severity.INFO
        case _:
            problem, warning = isinstance(event, _PROBLEMS), isinstance(event, _WARNINGS)
            return Severity.PROBLEM if problem else Severity.WARNING if warning else Severity.INFO


def is_for_people(event: ev.Event) -> bool:
    match event:
        case ev.StepCommitted(step=step):
            return step == 1 or step % EVERY_STEPS == 0
        case ev.LinksMeasured(reason=reason, links=links):
            return bool(reason) or any(link.problem for link in links)
        case ev.Enrolled(role=role):
            return role != Role.NODE  # that it joins is told
        case _:
            return not isinstance(event, _DETAILS)
