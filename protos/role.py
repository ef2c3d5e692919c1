"""What somebody may do in a run."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What somebody may do: see service/gate.py of the coordinator."""

    NODE = "node"
    OPERATOR = "operator"
    VIEWER = "viewer"
