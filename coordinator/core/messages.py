"""The coordinator's values as messages to nodes: links, assignments, the beginning of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dtfm.coordinator.core.givers import Givers
from dtfm.coordinator.core.refusal import shorten
from dtfm.coordinator.log.events import Link, SnapshotPart
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2
from dtfm.protos.outer import OuterStep
from dtfm.scheduler.formats.plan import pack_plan
from dtfm.scheduler.model.plan import Plan


def link_message(link: Link) -> control_pb2.LinkReport.Link:
    return control_pb2.LinkReport.Link(
        source=link.source,
        destination=link.destination,
        latency_seconds=link.latency_seconds,
        bandwidth=link.bandwidth,
    )


def part_message(bucket: int, part: SnapshotPart, nodes: Sequence[str]) -> control_pb2.Part:
    return control_pb2.Part(bucket=bucket, size_bytes=part.size_bytes, digest=bytes.fromhex(part.digest), nodes=nodes)


def outer_message(outer: OuterStep) -> control_pb2.OuterStep:
    return control_pb2.OuterStep(rate=outer.rate, momentum=outer.momentum)


def last_commit(ledger: Ledger) -> control_pb2.Commit | None:
    """The last commit, with the values that the step was applied with; None: there is no commit, or the run has gone back."""
    last, applied = ledger.training.last, ledger.training.optimizer
    if last is None or applied is None:
        return None
    return control_pb2.Commit(
        generation=last.generation,
        step=last.step,
        outer=outer_message(ledger.training.outer) if last.exchange and ledger.training.outer else None,
        learning_rate=last.learning_rate,
        weight_decay=applied.weight_decay,
        clips=(
            control_pb2.Commit.Clip(
                island=clip.island,
                first_layer=clip.layers[0],
                past_last_layer=clip.layers[1],
                factor=clip.factor,
            )
            for clip in ledger.training.clips
        ),
    )


def assignments(
    ledger: Ledger,
    reason: str,
    nodes: Iterable[str],
    givers: Mapping[str, Givers],
    snapshot: control_pb2.SnapshotSource,
    frozen: Sequence[control_pb2.FrozenLayer] = (),
) -> Iterator[tuple[str, control_pb2.CoordinatorMessage]]:
    """The messages that assign the ledger's plan to each of ``nodes``. ``givers``: by node, the holders of the state as of the
    last committed step; if there are none, all state comes from the ``snapshot``. ``frozen``: the holders of frozen layers. A
    node is told only the links that begin at it: all links of hundreds of nodes would not fit into a message."""
    plan = ledger.training.in_force
    source = control_pb2.SnapshotSource() if givers else snapshot
    on_disks = {node for part in source.parts for node in part.nodes}
    giving = {name for table in set(givers.values()) for layer in table for name in layer}
    holding = {node for layer in frozen for node in layer.nodes}
    named = {*plan.nodes, *giving, *on_disks, *holding} & ledger.members.keys()
    common = control_pb2.Assignment(
        generation=plan.generation,
        plan=pack_plan(plan),
        peers=[control_pb2.Peer(node=node, candidates=ledger.members[node].candidates) for node in sorted(named)],
        step=ledger.training.step,
        snapshot=source,
        reason=reason,
        last_commit=last_commit(ledger),
        counts_from=ledger.training.counts_from,
        frozen=frozen,
    )
    islands = {replica: stage.island for stage in plan.stages for replica in stage.replicas}
    nobody: Givers = ((),) * len(ledger.description.workload.layers)
    for node in nodes:
        message = control_pb2.CoordinatorMessage(assignment=common)
        assigned = message.assignment
        assigned.island_began = ledger.training.began.get(islands.get(node, 0), 0)
        assigned.takes_moments = islands.get(node, 0) in ledger.training.moments
        assigned.trained_before = ledger.training.trained(ledger.training.moments_began(islands.get(node, 0)))
        for names in givers.get(node, nobody):
            assigned.donors.add(nodes=names)
        for destination, link in sorted(ledger.reach.links.get(node, {}).items()):
            if destination in named:
                assigned.links.append(link_message(link))
        yield node, message


def beginnings(
    plan: Plan, step: int, progress: Mapping[str, control_pb2.Progress], look_at: Sequence[OuterStep] = ()
) -> Iterator[tuple[tuple[str, ...], control_pb2.Begin]]:
    """For the replicas of each stage, the beginning of ``step``, or its continuation from ``progress`` (by node).
    ``look_at``: see Stepping."""
    for index, stage in enumerate(plan.stages):
        before, after = (None if beside is None else plan.stages[beside] for beside in plan.beside(index))
        yield (
            stage.replicas,
            control_pb2.Begin(
                generation=plan.generation,
                step=step,
                activations=sorted(n for node in (after.replicas if after else ()) for n in progress[node].activations),
                gradients=sorted(n for node in (before.replicas if before else ()) for n in progress[node].gradients),
                look_at=map(outer_message, look_at),
            ),
        )


def abort(plan: Plan, step: int, reason: str) -> control_pb2.CoordinatorMessage:
    aborted = control_pb2.Abort(generation=plan.generation, step=step, reason=shorten(reason))
    return control_pb2.CoordinatorMessage(abort=aborted)
