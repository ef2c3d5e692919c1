"""The digests of a snapshot's state, bucket by bucket, as those agree on them who trained it. They go into the log beside the
snapshot, so that what its writers made of it is checked by whoever reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from blake3 import blake3

from dtfm.coordinator.core.copies.availability import is_under_way
from dtfm.coordinator.core.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Stage


def by_stage(transition: Transition, told: Mapping[str, tuple[bytes, Mapping[int, str]]]) -> None:
    """All replicas of each stage agree on one digest of its state after the last committed step. ``told``: by node that
    digest, and the digests (hex) of its buckets, which count if they are all of the stage's own and make up that of the stage.
    That does not say which they are of those that several stages share: there most parties count."""
    ledger = transition.state.ledger
    if not is_wanted(transition.state):
        return
    layers, views = len(ledger.holders), dict[int, dict[str, str]]()
    for stage in ledger.training.in_force.stages:
        said = {
            node: told[node][1] for node in stage.replicas if node in told and _is_whole(stage, layers, *told[node])
        }
        for bucket in set[int]().union(*said.values()):
            views.setdefault(bucket, {}).update({node: digests.get(bucket, "") for node, digests in said.items()})
    found = {bucket: _of_most(ledger, view) for bucket, view in views.items()}
    by_bucket(transition, {bucket: digest for bucket, digest in found.items() if digest})


def by_bucket(transition: Transition, digests: Mapping[int, str]) -> None:
    """All who hold the buckets agree on these digests (hex) of their state after the last committed step."""
    state = transition.state
    if is_wanted(state) and digests:
        whole = tuple(digests.get(bucket, "") for bucket in range(state.ledger.description.buckets))
        transition.emit(ev.StateAgreed(state.ledger.training.step, whole))


def is_wanted(state: State) -> bool:
    """Whether there is, or may soon be, a snapshot of the last committed step, of which the log does not say this yet."""
    ledger = state.ledger
    step = ledger.training.step
    there = step in ledger.copies.checkpoints or step in ledger.copies.on_disks or is_under_way(state, step)
    return there and step not in ledger.copies.agreed


def _is_whole(stage: Stage, layers: int, whole: bytes, digests: Mapping[int, str]) -> bool:
    """Whether the digests (hex, by bucket) are those of the stage's own buckets, and of some from number ``layers`` on, and make
    up that of the ``whole``."""
    own = set(range(*stage.layers))
    return own == {bucket for bucket in digests if bucket < layers} and _together(digests) == whole


def _together(digests: Mapping[int, str]) -> bytes:
    """The digest of a stage, from those of its buckets."""
    return blake3(b"".join(bytes.fromhex(digest) for _, digest in sorted(digests.items()))).digest()


def _of_most(ledger: Ledger, view: Mapping[str, str]) -> str:
    """What most parties say; empty: as many say something else. ``view``: digests by node."""
    times = Counter(digest for _, digest in {(ledger.party(node), digest) for node, digest in view.items()})
    (most, count), *others = times.most_common(2)
    return "" if others and others[0][1] == count else most


def told_in_votes(votes: Mapping[str, wire.StepReady]) -> Mapping[str, tuple[bytes, Mapping[int, str]]]:
    """What the votes for the next step say of the state, as `by_stage` takes it."""
    return {
        node: (vote.state_digest, {told.bucket: told.digest.hex() for told in vote.states})
        for node, vote in votes.items()
    }
