"""Ours to the wire's: plans, assignments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dtfm.coordinator.log.events import Link
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2, plan_pb2
from dtfm.scheduler.model.plan import Plan


def plan_message(plan: Plan) -> plan_pb2.Plan:
    return plan_pb2.Plan(
        generation=plan.generation,
        stages=[
            plan_pb2.Plan.Stage(
                first_layer=stage.layers[0],
                past_last_layer=stage.layers[1],
                replicas=stage.replicas,
                in_flight=stage.in_flight,
            )
            for stage in plan.stages
        ],
        routes=[plan_pb2.Plan.Route(nodes=route.nodes, micro_batches=route.micro_batches) for route in plan.routes],
        idle=plan.idle,
    )


def link_message(link: Link) -> control_pb2.LinkReport.Link:
    return control_pb2.LinkReport.Link(
        source=link.source,
        destination=link.destination,
        latency_seconds=link.latency_seconds,
        bandwidth=link.bandwidth,
    )


def assignments(
    ledger: Ledger, reason: str, nodes: Iterable[str], backup: Sequence[control_pb2.Part] = ()
) -> Iterator[tuple[str, control_pb2.Assignment]]:
    """For each of ``nodes`` the ledger's plan: state as of the last committed step comes from whoever holds it, or, where
    some of it is held by nobody, all of it from the parts of a ``backup``, or, where there are none, from the checkpoint. A node
    is told of the links that begin at it; all of them would not fit into a message where there are hundreds of nodes."""
    common = _assignment(ledger, reason, backup)
    named = {peer.node for peer in common.peers}
    for node in nodes:
        message = control_pb2.Assignment()
        message.CopyFrom(common)
        message.links.extend(
            link_message(link)
            for destination, link in sorted(ledger.links.get(node, {}).items())
            if destination in named
        )
        yield node, message


def beginnings(
    plan: Plan, step: int, progress: Mapping[str, control_pb2.Progress]
) -> Iterator[tuple[tuple[str, ...], control_pb2.Begin]]:
    """For the replicas of each stage the start of ``step``, which goes on where ``progress``, by node, says so."""
    for stage, before, after in zip(plan.stages, (None, *plan.stages), (*plan.stages[1:], None), strict=False):
        yield (
            stage.replicas,
            control_pb2.Begin(
                generation=plan.generation,
                step=step,
                activations=sorted(n for node in (after.replicas if after else ()) for n in progress[node].activations),
                gradients=sorted(n for node in (before.replicas if before else ()) for n in progress[node].gradients),
            ),
        )


def _assignment(ledger: Ledger, reason: str, backup: Sequence[control_pb2.Part]) -> control_pb2.Assignment:
    assert ledger.plan is not None
    assert ledger.described is not None
    held = ledger.step > 0 and ledger.state_is_held
    donors = ledger.holders if held else ((),) * len(ledger.described.workload.layers)
    last = ledger.last
    parts = () if held else backup
    named = {*ledger.plan.nodes, *(n for names in donors for n in names), *(n for part in parts for n in part.nodes)}
    return control_pb2.Assignment(
        plan=plan_message(ledger.plan),
        peers=[
            control_pb2.Peer(node=n, address=ledger.members[n].address) for n in sorted(named) if n in ledger.members
        ],
        step=ledger.step,
        donors=[control_pb2.Assignment.Donors(nodes=names) for names in donors],
        checkpoint="" if held or parts or ledger.step == 0 else ledger.checkpoints[ledger.step],
        backup=parts,
        reason=reason,
        last_commit=control_pb2.Commit(generation=last.generation, step=last.step, gradient_norm=last.gradient_norm)
        if last is not None
        else None,
        counts_from=ledger.counts_from,
    )
