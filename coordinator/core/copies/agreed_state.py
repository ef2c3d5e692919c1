"""The digests of a snapshot's state by bucket, where the nodes that trained it agree. They go into the log beside the snapshot.
Readers of the snapshot check its files against these digests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from blake3 import blake3

from dtfm.coordinator.core.copies.availability import is_under_way
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire


def by_stage(transition: Transition, said: Mapping[str, wire.StepReady | wire.Applied]) -> None:
    """Logs the digests of the last committed step's state. All replicas of each stage have ``said`` the same digest of the stage.

    A replica's digests of the stage's own buckets count if they are complete, and together give the digest of the stage. Buckets
    that several stages share cannot be checked in this way: for them, the digest counts that most parties say."""
    ledger = transition.state.ledger
    if not is_wanted(transition.state):
        return
    layers, views = len(ledger.holders), dict[int, dict[str, str]]()
    main, *_ = ledger.training.in_force.islands  # it writes snapshots
    for stage in main.stages:
        its: dict[str, Mapping[int, bytes]] = {}
        for node in said.keys() & stage.replicas:
            digests = {each.bucket: each.digest for each in said[node].states}
            together = blake3(b"".join(digest for _, digest in sorted(digests.items()))).digest()
            own = {bucket for bucket in digests if bucket < layers}
            if own == set(range(*stage.layers)) and together == said[node].state_digest:
                its[node] = digests
        for bucket in set[int]().union(*its.values()):
            views.setdefault(bucket, {}).update({node: each.get(bucket, b"").hex() for node, each in its.items()})
    found = {bucket: _of_most(ledger, view) for bucket, view in views.items()}
    by_bucket(transition, {bucket: digest for bucket, digest in found.items() if digest})


def by_bucket(transition: Transition, digests: Mapping[int, str]) -> None:
    """Logs these digests (hex) of the state after the last commit. All holders of the buckets in the plan's first island
    agree."""
    state, training = transition.state, transition.state.ledger.training
    island = training.in_force.stages[0].island
    began, is_writer = training.moments_began(island), training.writer in (None, island)
    if digests and is_writer and is_wanted(state) and not 0 < began == training.step:
        whole = tuple(digests.get(bucket, "") for bucket in range(state.ledger.description.buckets))
        transition.emit(ev.StateAgreed(training.step, whole, island, began))


def is_wanted(state: State) -> bool:
    """Whether a snapshot of the last committed step exists, or may soon exist, and the log has no digests of its state yet."""
    ledger = state.ledger
    step = ledger.training.step
    there = step in ledger.copies.checkpoints or step in ledger.copies.on_disks or is_under_way(state, step)
    return there and step not in ledger.copies.agreed


def _of_most(ledger: Ledger, view: Mapping[str, str]) -> str:
    """The digest that most parties say; empty: two digests are said by equally many. ``view``: digests by node."""
    times = Counter(digest for _, digest in {(ledger.party(node), digest) for node, digest in view.items()})
    (most, count), *others = times.most_common(2)
    return "" if others and others[0][1] == count else most
