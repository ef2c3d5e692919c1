"""Which events a person must know of. Scripts, `events`, and `serve --verbose` get all of them."""

from __future__ import annotations

from dtfm.coordinator.log import events as ev
from dtfm.protos.identity.access import Role

EVERY_STEPS = 10
"""Of the steps, the first one is shown, and then each of this number."""

_DETAILS = (
    # The way to readiness: who joined, and the plan that comes of it, are told.
    ev.NodePrepares,
    ev.NodeReady,
    ev.WaysChosen,
    ev.DeviceTimed,
    ev.DeviceShown,
    ev.DataConfirmed,
    ev.PlanStarted,
    ev.CodecsChosen,
    # What goes as it should after a step.
    ev.StateAgreed,
    ev.SnapshotWritten,
    # What comes of these is told: a changed standing, a quarantine.
    ev.WorkAudited,
    ev.GradientsClipped,
    ev.Suspected,
)


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
