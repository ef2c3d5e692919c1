"""From an assignment to an engagement: a stage with its state, its groups, streams to its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtfm.node.data.dataset import Data
from dtfm.node.model.bucket import Bucket
from dtfm.node.model.model import Model
from dtfm.node.state.recovery import acquire_stage
from dtfm.node.state.snapshot import Keeper
from dtfm.node.state.state_store import Held
from dtfm.node.training.generation import Engagement
from dtfm.node.model.placement import Share, group_of
from dtfm.node.training.progress import Progress
from dtfm.node.transport.sender import Outbox
from dtfm.node.transport.topic_queue import Closed
from dtfm.protos.control_pb2 import Assignment, Device, PlanFailed
from dtfm.protos.credentials import Identity
from dtfm.protos.plan_pb2 import Run


@dataclass(frozen=True, slots=True)
class Work:
    """What a node trains: read once from the run, whatever the plan."""

    run: Run
    model: Model
    data: Data
    identity: Identity


def lacks_state(model: Model, held: Held, assignment: Assignment, node: str, share: Share | None) -> bool:
    """Whether the coordinator counts on state at ``node`` that is not ``held``: then what it copied in advance is wanted now;
    else that is for the others' sake, and goes on."""
    wanted = {layer for layer, donors in enumerate(assignment.donors) if node in donors.nodes}
    wanted.update(range(*share.layers) if share is not None else ())
    return any(spec.index not in held.buckets and not wanted.isdisjoint(spec.layers) for spec in model.buckets)


def lost_state(model: Model, held: Held, assignment: Assignment, node: str) -> PlanFailed | None:
    """What to tell a coordinator that counts on state at ``node``, for whoever needs it, that is not ``held``."""
    counted_on = {layer for layer, donors in enumerate(assignment.donors) if node in donors.nodes}
    missing = {layer for spec in model.buckets if spec.index not in held.buckets for layer in spec.layers}
    lost = sorted(counted_on & missing)
    if not lost:
        return None
    problem = f"it does not have the state of layers {lost} as of step {assignment.step}, though it was taken to"
    return PlanFailed(generation=assignment.plan.generation, problem=problem, lost=lost)


def engage(
    work: Work,
    share: Share,
    assignment: Assignment,
    device: torch.device,
    hardware: Device,
    held: Held,
    copied: Mapping[int, Bucket],
    keeper: Keeper,
    earlier: Engagement | None,
    outbox: Outbox,
    wait: Callable[[Coroutine[Any, Any, None]], None],
) -> Engagement:
    """This node's part in the assignment's plan. ``earlier`` is its part in the last one, closed and released: its stage, and its
    progress on an interrupted step, are taken over where they still count. ``hardware``, ``held``, ``copied``, ``keeper`` and
    ``wait`` as in Engagement and acquire_stage. Raises ValueError, ConnectionError, OSError, and Closed when called off."""
    progress = None
    if earlier is not None and _still_holds(earlier, share, assignment, held):
        stage = earlier.stage
        progress = _still_counts(earlier.progress, share, assignment)
    else:
        stage = acquire_stage(
            share.node,
            work.run,
            work.model,
            device,
            held,
            copied,
            keeper,
            assignment,
            share.layers,
            work.identity,
            wait,
        )
    plan = assignment.plan
    groups = {i: group_of(plan, bucket.spec.layers) for i, bucket in stage.buckets.items()}
    neighbours = {*share.previous.values(), *share.next.values()}
    neighbours |= {*share.evaluation_previous.values(), *share.evaluation_next.values()}
    neighbours |= {member for group in groups.values() for member in group.members}
    peers = {p.node: p.address for p in assignment.peers if p.node in neighbours and p.node != share.node}
    bandwidth = {k.destination: k.bandwidth for k in assignment.links if k.source == share.node and k.bandwidth}
    codecs = earlier.codecs if earlier is not None else None
    holds = {k.destination: k.bandwidth * 2 * k.latency_seconds for k in assignment.links if k.source == share.node}
    engagement = Engagement(
        work.run, share, groups, stage, work.data, outbox, assignment.step, bandwidth, hardware, progress, codecs
    )
    try:
        lease = work.run.lease_seconds
        wait(outbox.connect(plan.generation, work.identity, peers, lease, lease, holds))
    except (ConnectionError, Closed):
        engagement.release()
        raise
    return engagement


def _still_holds(earlier: Engagement, share: Share, assignment: Assignment, held: Held) -> bool:
    """Whether the earlier stage is this one, with the state that the coordinator counts on."""
    stage = earlier.stage
    if (stage.first, stage.past_last) != share.layers or held.step != assignment.step:
        return False
    donors = [set(donors.nodes) for donors in assignment.donors]
    counted_on = assignment.step == 0 or all(share.node in donors[layer] for layer in range(*share.layers))
    return counted_on and all(held.buckets.get(index) is bucket for index, bucket in stage.buckets.items())


def _still_counts(progress: Progress, share: Share, assignment: Assignment) -> Progress | None:
    """The progress on the step that is next, if it can be built on."""
    if progress.step != assignment.step + 1 or progress.generation < assignment.counts_from or not progress.fits(share):
        return None
    progress.narrow(share)
    return progress
