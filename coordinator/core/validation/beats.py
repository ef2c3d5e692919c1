"""Checks of heartbeats."""

from __future__ import annotations

from dtfm.coordinator.core.refusal import check_number
from dtfm.coordinator.core.validation.votes import check_arrived
from dtfm.protos import control_pb2 as wire

COLDEST, HOTTEST = -100.0, 300.0
"""Degrees Celsius."""


def checked(beat: wire.Heartbeat) -> wire.Heartbeat:
    """The heartbeat. Raises Refused for impossible numbers."""
    for name, least, most in (("load", 0.0, 1.0), ("celsius", COLDEST, HOTTEST)):
        if beat.HasField(name):
            check_number(f"heartbeat.{name}", getattr(beat, name), least, most)
    check_arrived(beat.arriving)
    return beat
