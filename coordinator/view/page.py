"""The web page's content as JSON: the run after any event of the log, without addresses and of bounded size."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.idle import idle_nodes
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import planned_flops
from dtfm.coordinator.log.wording import describe_codecs, telling_bound
from dtfm.coordinator.view.beats import NO_BEATS, gpu
from dtfm.coordinator.view.condition.condition import conditions
from dtfm.coordinator.view.condition.pace import planned_seconds
from dtfm.coordinator.view.for_people import severity
from dtfm.coordinator.view.history import History, Span
from dtfm.coordinator.view.members import member_document, quarantine_document
from dtfm.coordinator.view.published import for_anybody
from dtfm.coordinator.view.so_far import SoFar
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan

Document = dict[str, Any]
"""A JSON object. Times are in seconds since 1970, and durations in seconds."""

MOST_NODES = 200
"""The number of nodes that are listed, and that have a lane."""
MOST_IN_MAP = 48
"""The number of nodes on each side of the map of links."""
MOST_FLOWS = 400
CURVES = ("step", "time", "loss", "tokens_per_second", "norm", "rate", "predicted_over_measured", "busy_share", "cost")
"""The columns of ``losses``."""


def page_text(
    so_far: SoFar, history: History, last: int, now: float, beats: Mapping[str, wire.Heartbeat] = NO_BEATS
) -> str:
    """The JSON of the page as of the last event that ``so_far`` has; ``history`` may have later events.

    ``last``: the number of the log's newest event, which may not be read yet. ``now``: the page's time. ``beats``: by member,
    the last heartbeat; empty on a page of the past.
    """
    at, ledger = so_far.sequence, so_far.ledger
    spans = history.spans_until(at)
    document = {
        "at": at,
        "last": last,
        "time": now,
        "began": so_far.began,
        "head": head(so_far, now),
        "losses": [[getattr(each, name) for name in CURVES] for each in history.losses.until(at)],
        "held_out": [[each.step, each.time, each.loss] for each in history.held_out.until(at)],
        "texts": [asdict(each) for each in ledger.texts.values()],
        "plan": plan_document(so_far),
        "nodes": list(_nodes(so_far, spans, beats)),
        "left_out": max(0, len(ledger.members) - MOST_NODES),
        "contributions": contributions(so_far),
        "links": link_map(ledger),
        "spans": _lanes(spans),
        "plans": [asdict(each) for each in history.plans if each.sequence <= at],
        "events": list(_events(so_far)),
    }
    return json.dumps(_shown(document), allow_nan=False, separators=(",", ":"))


def head(so_far: SoFar, now: float) -> Document:
    """The run in figures.

    - ``conditions``: how the run fares, the most urgent first. The first is the page's verdict.
    - ``said``: why the run is in this ``state``.
    - ``frequencies``: the held-out loss of a model that knows token frequencies alone.
    - ``ends``: when the run will be over. ``whole_cost``: its whole cost by then.
    """
    ledger = so_far.ledger
    training, told, said = ledger.training, ledger.evaluated, ""
    if ledger.outcome is not None:
        said = ledger.outcome.reason
    elif ledger.hold is not None:
        said = ledger.hold.narrate()
    elif training.plan is None:
        said = so_far.said
    return {
        "name": str(ledger.run.get("name", "")),
        "state": so_far.state,
        "said": said,
        "conditions": [asdict(each) for each in conditions(so_far, now)],
        "step": training.step,
        "steps": so_far.run_steps,
        "loss": training.last.loss if training.last is not None else None,
        "loss_is": so_far.trend.word,
        "held_out": told.loss if told is not None else None,
        "frequencies": told.unigram_entropy if told is not None else None,
        "tokens_per_second": so_far.tokens_per_second,
        "elapsed": so_far.elapsed(now) if so_far.began else 0.0,
        "left": so_far.left(now),
        "node_hours": so_far.lent_until(now) / 3600,
        "members": len(ledger.members),
        "ends": so_far.ends(now),
        "over": so_far.over if ledger.outcome is not None else None,
        "has_prices": so_far.has_prices,
        "cost": so_far.cost_until(now),
        "whole_cost": so_far.whole_cost(now),
        "hourly_price": so_far.hourly_price,
        "unpriced": so_far.unpriced,
        "currency": so_far.currency,
    }


def plan_document(so_far: SoFar) -> Document | None:
    """The plan in force, or the last plan of a run that is over.

    Each stage is in a column of its island. The seconds of a step are given three times: as the planner expects, as the lower
    bound of all plans, and as the last steps took. ``lost``: the nodes that flows still name, and the nodes that compute in
    their place. None: there is no plan.
    """
    ledger = so_far.ledger
    plan = ledger.training.plan or (so_far.plan if ledger.outcome is not None else None)
    if plan is None:
        return None
    return {
        "generation": plan.generation,
        "in_force": ledger.training.plan is not None and ledger.outcome is None,
        "stages": [
            {
                "name": plan.name_of(number),
                "column": plan.place_in_island(number),
                "layers": list(stage.layers),
                "replicas": list(zip(stage.replicas, stage.loads, strict=True)),
                "lost": [[each.node, each.heirs] for each in plan.takeovers if each.stage == number],
            }
            for number, stage in enumerate(plan.stages)
        ],
        "flows": list(islice(_flows(ledger, plan), MOST_FLOWS)),
        "predicted": ledger.training.predicted,
        "bound": telling_bound(ledger.training.predicted, ledger.training.bound, so_far.measured),
        "measured": so_far.measured,
    }


def _flows(ledger: Ledger, plan: Plan) -> Iterator[Document]:
    """The flows. ``megabytes``: the activations of a step, before compression; their gradients come back."""
    layers = ledger.described.workload.layers if ledger.described is not None else ()
    for boundary, flows in enumerate(plan.flows):
        past_last = plan.stages[boundary].layers[1]
        size = layers[past_last - 1].activation_bytes if past_last <= len(layers) else None
        for flow in flows:
            link = ledger.reach.links.get(flow.sender, {}).get(flow.receiver)
            yield {
                "stage": boundary,
                "sender": flow.sender,
                "receiver": flow.receiver,
                "micro_batches": flow.micro_batches,
                "megabytes": size * flow.micro_batches / 1e6 if size is not None else None,
                "codec": describe_codecs(ledger.training.codecs.get(flow.sender, {}).get(flow.receiver, {})),
                "milliseconds": link.latency_seconds * 1e3 if link is not None else None,
                "megabits": link.bandwidth * 8 / 1e6 if link is not None else None,
            }


def _nodes(so_far: SoFar, spans: list[Span], beats: Mapping[str, wire.Heartbeat]) -> Iterator[Document]:
    """The members by name, then the quarantined nodes.

    - ``busy`` and ``waited``: seconds of the last timed step.
    - ``planned``: the seconds that the node should have computed in that step.
    - ``flops``: the speed that plans count on.
    - ``slow``: the number of times its planned seconds that a slow node takes.
    - ``idle``: why the plan does without the node.
    - ``gpu``: what its driver says now.
    """
    ledger = so_far.ledger
    reached = _reached(ledger)
    does = {span.node: {"doing": span.doing, "place": span.place} for span in spans if not span.last}
    timed, plan = ledger.training.timed, ledger.training.plan
    loads = {n: load for s in (plan.stages if plan else ()) for n, load in zip(s.replicas, s.loads, strict=True)}
    of_stage = {n: sum(s.loads) for s in (plan.stages if plan else ()) for n in s.replicas}
    planned = planned_seconds(ledger, plan, so_far.speeds) if plan else {}
    shown = list(islice(sorted(ledger.members.items()), MOST_NODES))
    idles = idle_nodes(ledger, [name for name, _ in shown])
    for (node, member), flops in zip(shown, planned_flops(ledger, [name for name, _ in shown]), strict=True):
        to, slow, idle = ledger.training.codecs.get(node, {}), so_far.slow.get(node), idles.get(node)
        yield member_document(ledger, node) | {
            **does.get(node, {"doing": "", "place": ""}),
            "load": loads.get(node, 0),
            "of_stage": of_stage.get(node, 0),
            "flops": flops,
            "busy": timed.compute_seconds.get(node) if timed is not None else None,
            "waited": timed.wait_seconds.get(node) if timed is not None else None,
            "planned": planned.get(node),
            "slow": slow.times if slow is not None and slow.is_certain else None,
            "idle": None if idle is None else asdict(idle),
            "gpu": gpu(beats.get(node)),
            "reached": reached.get(node, ""),
            "sends": "; ".join(f"to {other} {describe_codecs(to[other])}" for other in sorted(to)[:10] if to[other]),
            "leaving": member.leaving,
        }
    for why in list(ledger.trust.quarantined.values())[-MOST_NODES:]:
        yield quarantine_document(ledger, why) | {"doing": "quarantined"}


def _events(so_far: SoFar) -> Iterator[Document]:
    """The last events, and the last ones that are more than information. A plan's reason is shown with the plan, not here
    again."""
    both = {record.sequence: record for record in (*so_far.serious, *so_far.recent)}
    for sequence, record in sorted(both.items()):
        event = record.event
        said = f"plan {event.generation} from step {event.step + 1:,} on" if isinstance(event, ev.PlanAdopted) else ""
        kind = "plan" if said else severity(event).word
        yield {"sequence": sequence, "time": record.time, "said": said or event.narrate(), "kind": kind}


def contributions(so_far: SoFar) -> list[Document]:
    """The nodes that gave most, in descending order. ``share``: of all micro-batches of committed steps."""
    ledger, whole = so_far.ledger, sum(given.micro_batches for given in so_far.given.values())
    most = sorted(so_far.given.items(), key=lambda item: -item[1].micro_batches)[:MOST_NODES]
    return [
        {
            "node": node,
            "steps": ledger.trust.worked.get(node, 0),
            "share": given.micro_batches / max(whole, 1),
            "present": node in ledger.members,
            "device": so_far.devices.get(node, ""),
            **asdict(given),
        }
        for node, given in most
    ]


def link_map(ledger: Ledger) -> Document:
    """The links as rows by source, each in order of destination. None: nothing is known; 0 megabits: nothing passes. Nodes of
    the plan come first, stage by stage, then the others by name."""
    plan = ledger.training.plan
    names = dict.fromkeys((*(plan.nodes if plan is not None else ()), *sorted(ledger.members)))
    shown = [node for node in names if node in ledger.members][:MOST_IN_MAP]
    rows = [[ledger.reach.links.get(source, {}).get(other) for other in shown] for source in shown]
    return {
        "nodes": shown,
        "milliseconds": [[link.latency_seconds * 1e3 if link else None for link in row] for row in rows],
        "megabits": [[link.bandwidth * 8 / 1e6 if link else None for link in row] for row in rows],
        "left_out": len(ledger.members) - len(shown),
    }


def _lanes(spans: list[Span]) -> list[Document]:
    """The lanes of the nodes that came last."""
    kept = set(islice(dict.fromkeys(span.node for span in reversed(spans)), MOST_NODES))
    return [asdict(span) for span in spans if span.node in kept]


def _reached(ledger: Ledger) -> Mapping[str, str]:
    """By node, the ways that lead to it."""
    ways = defaultdict[str, Counter[str]](Counter)
    for row in ledger.reach.links.values():
        for node, link in row.items():
            ways[node][(link.way or "direct") if link.bandwidth > 0 else "not at all"] += 1
    return {node: ", ".join(f"{way} from {n}" for way, n in each.most_common(10)) for node, each in ways.items()}


def _shown(document: Any) -> Any:
    """The JSON value without addresses, each text one printable line of bounded length, each number to five digits and finite."""
    match document:
        case dict():
            return {key: _shown(value) for key, value in document.items()}
        case list() | tuple():
            return [_shown(value) for value in document]
        case str():
            return for_anybody(document)
        case float() if abs(document) < 1e9:
            return float(f"{document:.5g}")
        case float():
            return round(document, 3) if math.isfinite(document) else None
    return document
