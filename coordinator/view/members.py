"""The nodes as people see them: a projection of the ledger."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dtfm.coordinator.log.events import NodeQuarantined
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.standing import earned
from dtfm.coordinator.view.out_of_use import Out
from dtfm.coordinator.view.so_far import SoFar

STATUSES = ("computing", "idle", "preparing", "relays")

OF_MEMBERS = ("relay", "stage", "layers", "device", "health", "address", "candidates", "links", "apart")
"""The keys that are null in the document of a node that is no member."""


def member_documents(so_far: SoFar) -> list[dict[str, Any]]:
    """One JSON object per node, sorted by name; then one per quarantine, with the same keys. docs/running.md describes them.

    - ``stage`` and ``layers``: None if the node has none.
    - a link's ``codecs``: the tensors that the plan sends over it, and the codec of each.
    - ``steps``: the number of committed steps that the node took part in.
    - ``standing``: a ``word`` ("new", "proven", "suspected" or "quarantined"), the ``reason``, and the number of ``audits`` in
      a row that found the node's work right.
    - ``quarantine``: the node's offence, the reason, and the step since when; None: it is not quarantined.
    - ``health``: whether plans may use the node, and if it has failed, how, how often in a row and why.
    - ``apart``: the nodes that it does not reach, or that do not reach it, for now.
    """
    ledger, out_of_use = so_far.ledger, so_far.out_of_use
    documents = [
        {
            **member_document(ledger, node),
            "address": member.address,
            "candidates": list(member.candidates),
            "links": {
                destination: {
                    "latency_seconds": link.latency_seconds,
                    "bandwidth": link.bandwidth,
                    "way": link.way,
                    "codecs": dict(ledger.training.codecs.get(node, {}).get(destination, {})),
                }
                for destination, link in sorted(ledger.reach.links.get(node, {}).items())
            },
            "health": _health(ledger, node, out_of_use.nodes.get(node)),
            "apart": [
                {"node": other, "reason": _why_apart(ledger, node, other), **_times(out)}
                for other, out in out_of_use.of(node).items()
            ],
        }
        for node, member in sorted(ledger.members.items())
    ]
    no_members = [quarantine_document(ledger, why) for why in ledger.trust.quarantined.values()]
    return documents + [document | dict.fromkeys(OF_MEMBERS) for document in no_members]


def _health(ledger: Ledger, node: str, out: Out | None) -> dict[str, Any]:
    ailing = ledger.health.get(node)
    return {
        "works": out is None,
        "problem": "" if ailing is None else ailing.problem,
        "reason": "" if ailing is None else ailing.why,
        "failures": 0 if ailing is None else ailing.failures,
        **_times(out),
    }


def _times(out: Out | None) -> dict[str, float | None]:
    return {"since": None if out is None else out.since, "tried_again": None if out is None else out.again}


def _why_apart(ledger: Ledger, one: str, other: str) -> str:
    links = ledger.reach.links
    ways = (links.get(one, {}).get(other), links.get(other, {}).get(one))
    return next((link.problem for link in ways if link is not None and link.problem), "")


def member_document(ledger: Ledger, node: str) -> dict[str, Any]:
    """A member without its addresses and links."""
    plan, member = ledger.training.plan, ledger.members[node]
    stage = plan.stage_of(node) if plan is not None else None
    return {
        "node": node,
        "relay": member.relay,
        "status": status(ledger, node),
        "steps": ledger.trust.worked.get(node, 0),
        "standing": earned(ledger, node).document,
        "quarantine": None,
        "stage": stage,
        "layers": list(plan.stages[stage].layers) if plan is not None and stage is not None else None,
        "device": asdict(member.device),
    }


def quarantine_document(ledger: Ledger, why: NodeQuarantined) -> dict[str, Any]:
    """A quarantine as an object. The node is no member, so nothing is known of its device and links."""
    return {
        "node": why.node,
        "status": "quarantined",
        "steps": ledger.trust.worked.get(why.node, 0),
        "standing": earned(ledger, why.node).document,
        "quarantine": {"charge": why.charge, "reason": why.reason, "step": why.step, "undecided": why.undecided},
    }


def status(ledger: Ledger, node: str) -> str:
    """What the node does: one of STATUSES."""
    if ledger.training.plan is not None and ledger.training.plan.stage_of(node) is not None:
        return "computing"
    member = ledger.members[node]
    return "relays" if member.relay == "only" else "idle" if member.ready else "preparing"
