"""What of an event is shown outside the coordinator's store."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.log.events import NodeJoined, StandbyPromoted
from dtfm.coordinator.log.store import Record


def published(record: Record) -> Record:
    """By an incarnation the coordinator tells a node that reconnects from another process; nobody else needs to know it."""
    match record.event:
        case NodeJoined() | StandbyPromoted():
            return replace(record, event=replace(record.event, incarnation=""))
    return record
