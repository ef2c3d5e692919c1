from __future__ import annotations

from typing import Any

from dtfm.protos.control_pb2 import Assignment
from dtfm.scheduler.formats.plan import pack_plan
from dtfm.scheduler.model.plan import Plan


def assigned(plan: Plan, **fields: Any) -> Assignment:
    """The plan as a node is told of it, with further ``fields``."""
    return Assignment(generation=plan.generation, plan=pack_plan(plan), **fields)
