"""The members' own words in heartbeats, which no log has: how busy and how warm a GPU is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dtfm.protos import control_pb2 as wire

NO_BEATS: Mapping[str, wire.Heartbeat] = MappingProxyType({})


def gpu(beat: wire.Heartbeat | None) -> dict[str, Any] | None:
    """``load``, from 0 to 1, and ``celsius``, each None if unknown. None if neither is known."""
    if beat is None or not (beat.HasField("load") or beat.HasField("celsius")):
        return None
    return {
        "load": beat.load if beat.HasField("load") else None,
        "celsius": beat.celsius if beat.HasField("celsius") else None,
    }
