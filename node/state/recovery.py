"""What a node has of the state that a plan needs, and where it gets the rest: from replicas, a snapshot or the seed."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from dtfm.node.data.allowed import check_checkpoint
from dtfm.node.host.work import WORK
from dtfm.node.model.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.loaded_run import LoadedRun
from dtfm.node.model.placement import Placement
from dtfm.node.model.precision import compute_dtype, run_dtype
from dtfm.node.model.stage import Stage, build_stage, initialise
from dtfm.node.network.dialling import Dialler
from dtfm.node.state.snapshot_files import SnapshotDamaged, read_bucket
from dtfm.node.state.snapshots import Snapshots
from dtfm.node.state.state_store import HeldState
from dtfm.node.state.transfer import Wanted, fetch
from dtfm.protos.control_pb2 import Assignment, Part, Peer, SnapshotSource

Result = TypeVar("Result")


class Wait(Protocol):
    """Runs ``work`` on the event loop, and returns its result. Raises Closed when called off."""

    def __call__(self, work: Coroutine[Any, Any, Result], /) -> Result: ...


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a node has of the state that an assignment needs, as of the assignment's step.

    ``held`` is what it has in memory and ``copied`` what it has as a standby, by bucket. ``promised`` are the layers that the
    coordinator expects here, for this node or for others.
    """

    step: int
    held: Mapping[int, Bucket]
    promised: frozenset[int]
    specs: Sequence[BucketSpec]
    layers: range
    copied: Mapping[int, Bucket] = field(default_factory=dict)

    @property
    def is_incomplete(self) -> bool:
        """Whether a bucket is missing that this node is going to train or that the coordinator expects here."""
        wanted = self.promised.union(self.layers)
        return any(not wanted.isdisjoint(spec.layers) for spec in self._missing)

    @property
    def lost(self) -> list[int]:
        """The layers that the coordinator expects here but that are missing."""
        return sorted(self.promised.intersection(layer for spec in self._missing for layer in spec.layers))

    @property
    def expected(self) -> Mapping[int, Bucket]:
        """The held buckets on which the coordinator counts."""
        return {i: b for i, b in self.held.items() if not self.promised.isdisjoint(b.spec.layers)}

    @property
    def usable(self) -> Mapping[int, Bucket]:
        """The buckets that the next stage may take over unchanged. Held ones only if they are expected: otherwise the state
        comes from somewhere else."""
        return {**self.copied, **self.expected}

    def still_has(self, stage: Stage, placement: Placement) -> bool:
        """Whether ``stage``, of an earlier plan, can be used again, unchanged, for ``placement``."""
        same = (stage.first, stage.past_last, stage.keeping) == (*placement.layers, placement.keeping)
        trusted = self.step == 0 or self.promised.issuperset(self.layers)
        return (
            same
            and bool(stage.buckets)  # else it was released
            and trusted
            and not placement.is_new
            and all(self.held.get(index) is bucket for index, bucket in stage.buckets.items())
        )

    @property
    def _missing(self) -> list[BucketSpec]:
        return [spec for spec in self.specs if spec.index not in self.held and spec.index not in self.copied]


def take_inventory(
    assignment: Assignment, specs: Sequence[BucketSpec], node: str, placement: Placement | None, held: HeldState
) -> Inventory:
    """The part of ``assignment``'s state that ``node`` has in memory; ``specs`` are the model's buckets."""
    promised = frozenset(layer for layer, donors in enumerate(assignment.donors) if node in donors.nodes)
    buckets = held.buckets if held.step == assignment.step else {}
    layers = range(*placement.layers) if placement is not None else range(0)
    return Inventory(assignment.step, buckets, promised, specs, layers)


def acquire_stage(
    loaded: LoadedRun,
    device: torch.device,
    placement: Placement,
    assignment: Assignment,
    inventory: Inventory,
    snapshots: Snapshots,
    wait: Wait,
) -> Stage:
    """The stage of ``placement`` with its state as of the assignment's step.

    Each bucket comes from ``inventory`` if it is usable there, else from its donors, else from the assignment's snapshot,
    else, at step 0, from the seed.

    Raises:
        ValueError: no source has a bucket, or the checkpoint is damaged, of another model or where the run may not read.
            SnapshotDamaged: a part of the snapshot is damaged on every disk, or differs from the agreed one.
        ConnectionError, OSError: a source is out of reach.
    """
    run, usable = loaded.run, inventory.usable
    at_rest = placement.rounds.at_rest(assignment.step)
    if placement.is_new:  # others may still need the state here
        usable = {index: bucket.for_new_island(at_rest=at_rest) for index, bucket in usable.items()}
    takes_moments = placement.is_new and assignment.takes_moments
    donors = [list(d.nodes) for d in assignment.donors] or [[] for _ in loaded.model.layers]
    stage = build_stage(
        loaded.model,
        *placement.layers,
        device,
        run_dtype(run),
        computes_in=compute_dtype(run),
        keeping=placement.keeping,
        held=usable,
    )
    addresses = {peer.node: peer for peer in assignment.peers}
    parts = {part.bucket: part for part in assignment.snapshot.parts}
    from_peers: list[tuple[Bucket, list[Peer]]] = []
    from_disks: dict[int, tuple[Bucket, Part]] = {}
    moments_from: list[tuple[Bucket, list[Peer]]] = []
    for index, bucket in stage.buckets.items():
        WORK.did()
        names = dict.fromkeys(n for layer in bucket.spec.layers for n in donors[layer] if n != placement.node)
        others = [addresses[name] for name in names if name in addresses]
        if takes_moments:
            moments_from.append((bucket, others))
        if index in usable:
            continue
        if others:
            from_peers.append((bucket, others))
        elif index in parts:
            from_disks[index] = bucket, parts[index]
        elif assignment.snapshot.folder:
            source = assignment.snapshot
            check_checkpoint(source.folder, loaded.allowed.places)
            read_bucket(source.folder, bucket, source.manifest, weights=source.weights)
            check_agreed([bucket], source)
        elif assignment.step == 0:
            initialise(loaded.model, bucket, run.seed)
        else:
            raise ValueError(f"no node has the state of bucket {index} as of step {assignment.step}")
    fetched = partial(fetch_states, from_peers, assignment.step, placement.generation, loaded.dialler)
    if from_peers and (placement.is_new or not at_rest):
        wait(fetched(run.lease_seconds, shared=True))
    brought = list(stage.buckets.values()) if placement.is_new else [bucket for bucket, _ in from_peers]
    for bucket in brought if not at_rest else ():
        bucket.rest(rounds=True)  # the run was last at an exchange with these parameters
    if from_peers and not placement.is_new:
        wait(fetched(run.lease_seconds))
    if from_disks:
        wait(snapshots.restore(assignment.step, from_disks, assignment.peers))
        check_agreed((bucket for bucket, _ in from_disks.values()), assignment.snapshot)
    for index, bucket in stage.buckets.items():
        for moment in bucket.moments:  # there from now on: other threads will read them
            if placement.is_new:
                moment.zero_()
        stage.refresh(index)
    if moments_from:
        wait(fetch_moments(moments_from, assignment.step, placement.generation, loaded.dialler, run.lease_seconds))
    return stage


def check_agreed(buckets: Iterable[Bucket], snapshot: SnapshotSource) -> None:
    """Raises SnapshotDamaged if a bucket's state differs from the digest that its trainers agreed on."""
    agreed = {state.bucket: state.digest for state in snapshot.states}
    for bucket in buckets:
        index = bucket.spec.index
        if index in agreed and bucket.digests()[0] != agreed[index]:
            where = f"checkpoint {snapshot.folder}" if snapshot.folder else "the snapshot on the disks"
            raise SnapshotDamaged(f"{where}: bucket {index} is whole, but not the state that its trainers agreed on")


async def fetch_moments(
    wanted: Sequence[tuple[Bucket, Sequence[Peer]]], step: int, generation: int, dialler: Dialler, patience: float
) -> None:
    """Replaces the buckets' moments by another island's as of ``step``, each from the memory of its own donors, which it names
    beside those that gave the rest; see `fetch`."""

    def take(bucket: Bucket, begin: int, data: memoryview, offset: int) -> None:
        bucket.load(data, begin + offset)

    buckets = []
    for bucket, donors in wanted:
        begin, size = bucket.parameters.nbytes, sum(moment.nbytes for moment in bucket.moments)
        buckets.append(Wanted(bucket.spec.index, size, donors, partial(take, bucket, begin), begin=begin))
    gave = await fetch(buckets, step, generation, dialler, patience)
    for bucket, _ in wanted:
        bucket.donors = tuple(dict.fromkeys((*bucket.donors, *gave[bucket.spec.index])))


async def fetch_states(
    wanted: Sequence[tuple[Bucket, Sequence[Peer]]],
    step: int,
    generation: int,
    dialler: Dialler,
    patience: float,
    *,
    shared: bool = False,
) -> None:
    """Fills buckets with their state as of ``step``, or with the part that islands have ``shared``, each from the memory of its
    own donors, which it names; see `fetch`."""
    buckets = [
        Wanted(
            bucket.spec.index,
            bucket_bytes(bucket.spec, bucket.parameters.dtype, shared=shared),
            donors,
            partial(bucket.load, shared=shared),
            shared=shared,
        )
        for bucket, donors in wanted
    ]
    gave = await fetch(buckets, step, generation, dialler, patience)
    for bucket, _ in wanted:
        bucket.donors = gave[bucket.spec.index]
