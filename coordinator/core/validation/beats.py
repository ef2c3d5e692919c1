"""Checks of heartbeats."""

from __future__ import annotations

from dtfm.coordinator.core.refusal import check_number, require
from dtfm.protos import control_pb2 as wire

MOST_DOING = 120
"""Characters of Heartbeat.doing."""
COLDEST, HOTTEST = -100.0, 300.0
"""Degrees Celsius."""


def checked(beat: wire.Heartbeat) -> wire.Heartbeat:
    """The heartbeat. Raises Refused for numbers that cannot be, or a text that is too long."""
    for name, least, most in (("load", 0.0, 1.0), ("done", 0.0, 1.0), ("celsius", COLDEST, HOTTEST)):
        if beat.HasField(name):
            check_number(f"heartbeat.{name}", getattr(beat, name), least, most)
    require(len(beat.doing) <= MOST_DOING, "heartbeat.doing", beat.doing, f"at most {MOST_DOING} characters")
    return beat
