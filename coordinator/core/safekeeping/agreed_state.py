"""The digests of a snapshot's state, bucket by bucket, as those agree on them who trained it. They go into the log beside the
snapshot, so that what its writers made of it is checked by whoever reads it."""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire


def by_stage(transition: Transition, told: Mapping[str, tuple[bytes, Mapping[int, str]]]) -> None:
    """All replicas of each stage agree on one digest of its state after the last committed step. ``told``: by node that
    digest, and the digests (hex) of its buckets, which count if they make up that of the stage."""
    ledger = transition.state.ledger
    assert ledger.plan is not None
    if not is_wanted(transition.state):
        return
    layers, found = len(ledger.holders), dict[int, str]()
    for stage in ledger.plan.stages:
        for node in stage.replicas:
            whole, digests = told.get(node, (b"", {}))
            own = all(bucket >= layers or bucket in range(*stage.layers) for bucket in digests)
            if digests and own and _together(digests) == whole:
                found.update(digests)
                break
    by_bucket(transition, found)


def by_bucket(transition: Transition, digests: Mapping[int, str]) -> None:
    """All who hold the buckets agree on these digests (hex) of their state after the last committed step."""
    state = transition.state
    assert state.ledger.described is not None
    if is_wanted(state) and digests:
        whole = tuple(digests.get(bucket, "") for bucket in range(state.ledger.described.buckets))
        transition.emit(ev.StateAgreed(state.ledger.step, whole))


def is_wanted(state: State) -> bool:
    """Whether there is, or may soon be, a snapshot of the last committed step, of which the log does not say this yet."""
    ledger = state.ledger
    step = ledger.step
    on_disks = ledger.on_disks is not None and ledger.on_disks.step == step
    there = on_disks or step in ledger.checkpoints or any(tally.step == step for tally in state.safekeeping.snapshots)
    return there and step not in ledger.agreed


def _together(digests: Mapping[int, str]) -> bytes:
    """The digest of a stage, from those of its buckets."""
    return blake3(b"".join(bytes.fromhex(digest) for _, digest in sorted(digests.items()))).digest()


def told_in_votes(state: State, votes: Mapping[str, wire.StepReady]) -> Mapping[str, tuple[bytes, Mapping[int, str]]]:
    """What the votes for the next step say of the state, as `by_stage` takes it. Buckets that do not exist are left out."""
    assert state.ledger.described is not None
    buckets = state.ledger.described.buckets
    return {
        node: (vote.state_digest, {told.bucket: told.digest.hex() for told in vote.states if told.bucket < buckets})
        for node, vote in votes.items()
    }
