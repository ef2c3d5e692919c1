"""Where a node gets the state of its buckets: from itself, from the replicas, from a backup, from the checkpoint, or from the
seed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch

from dtfm.node.model.bucket import Bucket, bucket_bytes
from dtfm.node.model.model import Model
from dtfm.node.model.stage import Stage, build_stage, initialise
from dtfm.node.model.workload import run_dtype
from dtfm.node.state.checkpoint import read_bucket
from dtfm.node.state.snapshot import Keeper
from dtfm.node.state.state_store import Held
from dtfm.node.state.transfer import Wanted, fetch
from dtfm.protos.control_pb2 import Assignment, Part, Peer
from dtfm.protos.credentials import Identity
from dtfm.protos.plan_pb2 import BF16, Run


def acquire_stage(
    node: str,
    run: Run,
    model: Model,
    device: torch.device,
    held: Held,
    copied: Mapping[int, Bucket],
    keeper: Keeper,
    assignment: Assignment,
    layers: tuple[int, int],
    identity: Identity,
    wait: Callable[[Coroutine[Any, Any, None]], None],
) -> Stage:
    """``node``'s stage of ``layers`` with its state as of ``assignment.step``.

    A bucket comes from ``held`` where the coordinator counts on that, else from what was ``copied`` in advance, else from its
    donors, else from the backup, of which ``keeper`` has what this node has, else from the checkpoint, else, at step 0, from the
    seed. ``wait`` runs a coroutine on the event loop and returns when it is done. Raises ValueError, ConnectionError or OSError,
    and of these BackupError.
    """
    donors = [list(d.nodes) for d in assignment.donors] or [[] for _ in model.layers]
    mine = dict(copied) | {
        index: bucket
        for index, bucket in held.buckets.items()
        if held.step == assignment.step and any(node in donors[layer] for layer in bucket.spec.layers)
    }
    autocast = run.train.precision == BF16
    stage = build_stage(model, *layers, device, run_dtype(run), autocast=autocast, held=mine)
    addresses = {peer.node: peer for peer in assignment.peers}
    backup = {part.bucket: part for part in assignment.backup}
    from_peers: list[tuple[Bucket, list[Peer]]] = []
    from_backup: dict[int, tuple[Bucket, Part]] = {}
    for index, bucket in stage.buckets.items():
        if index in mine:
            continue
        names = dict.fromkeys(n for layer in bucket.spec.layers for n in donors[layer] if n != node)
        others = [addresses[name] for name in names if name in addresses]
        if others:
            from_peers.append((bucket, others))
        elif index in backup:
            from_backup[index] = bucket, backup[index]
        elif assignment.checkpoint:
            read_bucket(assignment.checkpoint, bucket)
        elif assignment.step == 0:
            initialise(model, bucket, run.seed)
        else:
            raise ValueError(f"nobody has the state of bucket {index} as of step {assignment.step}")
    if from_peers:
        wait(fetch_states(from_peers, assignment.step, assignment.plan.generation, identity, run.lease_seconds))
    if from_backup:
        wait(keeper.restore(assignment.step, from_backup, assignment.peers))
    return stage


async def fetch_states(
    wanted: Sequence[tuple[Bucket, Sequence[Peer]]], step: int, generation: int, identity: Identity, patience: float
) -> None:
    """Fills buckets with their state as of ``step``, each from the memory of its own donors; as `fetch`."""
    buckets = [
        Wanted(bucket.spec.index, bucket_bytes(bucket.spec, bucket.parameters.dtype), donors, bucket.load)
        for bucket, donors in wanted
    ]
    await fetch(buckets, step, generation, identity, patience)
