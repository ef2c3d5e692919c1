"""From an assignment to a generation: a stage with its state, its groups, streams to its peers."""

from __future__ import annotations

import asyncio
from functools import partial

from dtfm.node.host.device import free_memory
from dtfm.node.model.bucket import HOST, Bucket, bucket_bytes
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.placement import Placement
from dtfm.node.model.precision import compute_dtype, run_dtype
from dtfm.node.model.stage import Stage, home_of
from dtfm.node.state.images import FREE_MEMORY_FRACTION
from dtfm.node.state.making_room import make_room
from dtfm.node.state.recovery import Inventory, Wait, acquire_stage
from dtfm.node.training.equipment import Equipment
from dtfm.node.training.generation import Generation, Inherited
from dtfm.node.training.reduction.contribution_bound import ContributionBound
from dtfm.node.training.step.progress import Progress
from dtfm.node.transport.receiver import Closed
from dtfm.protos.control_pb2 import Assignment


def set_up(
    loaded: LoadedRun,
    placement: Placement,
    assignment: Assignment,
    inventory: Inventory,
    earlier: Generation | None,
    equipment: Equipment,
    wait: Wait,
) -> Generation:
    """This node's part in the assignment's plan.

    ``earlier``, its part in the last plan, is closed and released; its stage, and its progress on an interrupted step, are
    taken over if they still count. Raises what `acquire_stage` and `Sender.connect` raise, and Closed when called off.
    """
    stage = earlier.stage if earlier is not None and inventory.still_has(earlier.stage, placement) else None
    progress = None
    if earlier is not None:
        # Gradients are means over the island's share of a step, which must be the same.
        if stage is not None and earlier.placement.places == placement.places:
            progress = _usable_progress(earlier.progress, placement, assignment)
        if progress is None:
            earlier.progress.discard()  # its graphs hold the old stage's weights, and memory that the new one needs
    if stage is None:
        if frozen := loaded.model.frozen:
            # Called off, it goes on in its thread: what it has read stays.
            wait(asyncio.to_thread(frozen.load, *placement.layers, compute_dtype(loaded.run)))
        stage = acquire_stage(loaded, equipment.device, placement, assignment, inventory, equipment.snapshots, wait)
    if placement.rounds.at_rest(assignment.step):
        for bucket in stage.buckets.values():
            bucket.rest(rounds=placement.rounds.count > 0)
    links = [link for link in assignment.links if link.source == placement.node]
    bandwidth = {link.destination: link.bandwidth for link in links if link.bandwidth}
    inherited = inherit(earlier, stage, placement, assignment.step, progress) if earlier is not None else Inherited()
    around = [peer for peer in assignment.peers if peer.node in placement.peers | placement.near]
    generation = Generation(
        loaded, placement, stage, assignment.step, equipment.sender, equipment.hardware, bandwidth, inherited, around
    )
    dialler = loaded.dialler
    targets = {p.node: dialler.target(p) for p in assignment.peers if p.node in placement.peers}
    lease = loaded.run.lease_seconds
    try:
        wait(equipment.sender.connect(generation.number, dialler, targets, lease, lease))
    except (ConnectionError, Closed):
        generation.release()
        raise
    return generation


def free_first(
    loaded: LoadedRun, placement: Placement, assignment: Assignment, earlier: Generation | None, equipment: Equipment
) -> None:
    """Makes room for the placement's stage where it does not fit beside the old one. Releases the stage of ``earlier``, this
    node's part in the last plan, unless that stage goes on. Raises OSError if the disk has no room for state that others need."""
    if earlier is not None:
        stage = earlier.stage
        if stage.buckets and (stage.first, stage.past_last, stage.keeping) == (*placement.layers, placement.keeping):
            return
        earlier.progress.discard()
        stage.release()
    loaded.model.frozen.keep(placement.layers)
    expected = {layer for layer, donors in enumerate(assignment.donors) if equipment.node in donors.nodes}
    mine = [spec for spec in loaded.model.buckets if spec.used_by(*placement.layers)]
    home = home_of(placement.keeping, equipment.device)
    left = -1  # bytes for state in the host's memory; none where the device computes there
    if equipment.device != HOST:
        held, dtype = equipment.store.held.buckets, run_dtype(loaded.run)
        more = sum(bucket_bytes(spec, dtype) for spec in mine if spec.index not in held) if home == HOST else 0
        left = int(FREE_MEMORY_FRACTION * free_memory(HOST)) - more
    make_room(
        equipment.store,
        needed={spec.index for spec in mine},
        expected={spec.index for spec in loaded.model.buckets if not expected.isdisjoint(spec.layers)},
        placed=partial(Bucket.placed, device=equipment.device, home=home),
        host_bytes=left,
        scratch=equipment.snapshots.disk.scratch,
    )


def inherit(earlier: Generation, stage: Stage, placement: Placement, step: int, progress: Progress | None) -> Inherited:
    """Returns the things that a generation with this ``stage``, ``placement`` and ``progress`` takes over from ``earlier``.
    ``step`` is the last one in the stage's state. If the earlier generation stood at another step, its residuals do not count."""
    carried = earlier.exchanger.carried
    residuals = {index: carried[index] for index in placement.exchange_groups if index in carried}
    bound, of_changes = (
        ContributionBound(bound) if bound is not None and stage is not earlier.stage else bound
        for bound in (earlier.reducer.bound, earlier.exchanger.bound)
    )
    if earlier.progress.step != step + 1:
        residuals = {}
    return Inherited(progress, earlier.codecs, bound, of_changes, residuals)


def _usable_progress(progress: Progress, placement: Placement, assignment: Assignment) -> Progress | None:
    """The progress on the next step, if it can be built on."""
    is_next = progress.step == assignment.step + 1 and progress.generation >= assignment.counts_from
    if not is_next or not progress.fits(placement):
        return None
    progress.narrow(placement)
    return progress
