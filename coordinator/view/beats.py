"""Heartbeats of members, as the page shows them: how busy a GPU is, and why a node is not ready yet. No log has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dtfm.protos import control_pb2 as wire

NO_BEATS: Mapping[str, wire.Heartbeat] = MappingProxyType({})


def gpu(beat: wire.Heartbeat | None) -> dict[str, Any] | None:
    """``load``, from 0 to 1, and ``celsius``, each None where it is not known; None if neither is."""
    if beat is None or not (beat.HasField("load") or beat.HasField("celsius")):
        return None
    return {
        "load": beat.load if beat.HasField("load") else None,
        "celsius": beat.celsius if beat.HasField("celsius") else None,
    }


def doing(beats: Mapping[str, wire.Heartbeat]) -> dict[str, str]:
    """By member, the long task that it is at, like "reading the data, 40 %". Empty: no member is at one."""
    return {node: _words(beat) for node, beat in beats.items() if beat.doing}


def _words(beat: wire.Heartbeat) -> str:
    return f"{beat.doing}, {beat.done:.0%}".replace("%", " %") if beat.HasField("done") else beat.doing
