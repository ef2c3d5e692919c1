"""PLAN.json: a plan, and the decision that led to it."""

from __future__ import annotations

import zlib
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from dtfm.scheduler.formats.fields import read_document
from dtfm.scheduler.model.decision import Decision
from dtfm.scheduler.model.plan import Plan

_ADAPTER = TypeAdapter(Plan)

MOST_BYTES = 8 << 20
"""The largest PLAN.json of a plan."""


def parse_plan(text: str) -> Plan:
    """A plan from PLAN.json: ``{"generation", "stages": [{"layers", "replicas", "loads", "in_flight", "keeping"}], "flows",
    "idle", "takeovers", "rounds", "owed", "counted", "frees_first"}``. plan.check says whether it fits together, and
    plan.validate whether it suits a cluster and a workload.

    ``keeping``, optional, has by replica ``{"checkpointing": "none" | "layer", "optimizer_state": "device" | "host"}``; without
    it all replicas keep as Keeping() says. ``flows`` has a list per boundary between two stages, of ``{"sender", "receiver",
    "micro_batches"}``; ``takeovers`` are ``{"stage", "node", "place", "heirs": [[node, micro_batches], ...]}``.
    """
    return read_document(_ADAPTER, text)


def plan_document(plan: Plan) -> dict[str, Any]:
    """PLAN.json as an object; parse_plan reads its dump back."""
    document: dict[str, Any] = _ADAPTER.dump_python(plan, mode="json")
    return document


def pack_plan(plan: Plan) -> bytes:
    """PLAN.json, compressed."""
    return zlib.compress(_ADAPTER.dump_json(plan))


def unpack_plan(data: bytes) -> Plan:
    """The inverse of `pack_plan`. Raises ValueError."""
    try:
        text = zlib.decompressobj().decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"the plan is not compressed by zlib: {error}") from None
    return parse_plan(text.decode(errors="replace"))


def gap(decision: Decision) -> float | None:
    """The seconds of the decision's plan over its lower bound, by its objective; None without a bound."""
    predicted, bound = decision.predicted, decision.lower_bound_seconds
    seconds = predicted.iteration_seconds if predicted.paper is None else predicted.paper.total
    return seconds / bound if bound > 0 else None


def decision_document(decision: Decision, elapsed_seconds: float) -> dict[str, Any]:
    """The object that ``dtfm-coordinator plan --json`` prints.

    No plan can take less than ``lower_bound_seconds``. The plan takes ``gap`` times as long; null without a bound. ``reason``
    is the sentence, and ``reason_code`` the value of Reason. With the paper's objective, ``predicted`` has ``paper``, and the
    bound and the gap are of its total.
    """
    predicted, paper = asdict(decision.predicted), decision.predicted.paper
    del predicted["paper"]
    if paper is not None:
        predicted["paper"] = {"total": paper.total, **asdict(paper)}
    return {
        "plan": plan_document(decision.plan),
        "predicted": predicted,
        "lower_bound_seconds": decision.lower_bound_seconds,
        "gap": gap(decision),
        "evaluations": decision.evaluations,
        "reason": decision.sentence,
        "reason_code": decision.reason.value,
        "elapsed_seconds": elapsed_seconds,
    }
